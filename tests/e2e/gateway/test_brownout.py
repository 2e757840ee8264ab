"""Brown-out as clients see it: a header, and another model that answers under its own name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvasir.config.spec.deployment import FurtherModelSpec, PoolSpec
from kvasir.core.requests import FinishReason, Role
from kvasir.ports.router import BrownoutView

Start = Callable[..., Awaitable[Any]]
DEPLOYED = {
    "disaggregation": "never",
    "models": (FurtherModelSpec(name="smaller", max_model_len=64),),
    "pools": (
        PoolSpec(name="both", role=Role.BOTH),
        PoolSpec(name="smaller", role=Role.BOTH, model="smaller"),
    ),
}
FALLBACK = BrownoutView(2, "2; cap_max_tokens=256; fallback_model=smaller", "smaller")


@pytest.fixture
async def edge(start: Start) -> Any:
    """A gateway of two models, whose router answers each request with one token."""
    edge = await start(deployed=DEPLOYED)

    def answered(stream: Any) -> None:
        stream.emit("Ahoy", finish=FinishReason.STOP)
        stream.finish()

    edge.router.script = answered
    return edge


async def ask(edge: Any, prompt: str = "hi", model: str = "kvasir-tiny", **fields: Any) -> tuple[Any, Any]:
    client = await edge.client()
    raw = await client.completions.with_raw_response.create(
        **{"model": model, "prompt": prompt, "max_tokens": 4, **fields}
    )
    return raw.headers, raw.parse()


async def test_without_pressure_nothing_is_said(edge: Any) -> None:
    headers, _ = await ask(edge)
    assert "x-kvasir-brownout" not in headers


async def test_what_is_done_under_pressure_is_named_in_a_header(edge: Any) -> None:
    edge.router.browned_out = BrownoutView(1, "1; cap_max_tokens=256")
    headers, answer = await ask(edge)
    assert headers["x-kvasir-brownout"] == "1; cap_max_tokens=256"
    assert answer.model == "kvasir-tiny"


async def test_the_fallback_answers_under_its_own_name(edge: Any) -> None:
    edge.router.browned_out = FALLBACK
    headers, answer = await ask(edge)
    assert headers["x-kvasir-brownout"] == FALLBACK.text
    assert (answer.model, edge.router.streams[-1].request.model) == ("smaller", "smaller")


@pytest.mark.parametrize(
    "what",
    [{"prompt": "word " * 200}, {"max_tokens": 60}, {"model": "pirate"}],
    ids=["prompt", "output", "adapter"],
)
async def test_what_the_fallback_cannot_serve_goes_to_the_model_that_was_named(
    edge: Any, what: dict[str, Any]
) -> None:
    edge.router.browned_out = FALLBACK
    asked = {"prompt": "a few words that make more than four tokens", **what}
    headers, answer = await ask(edge, **asked)
    assert answer.model == what.get("model", "kvasir-tiny")
    assert edge.router.streams[-1].request.model == "kvasir-tiny"
    assert [*headers.raw].count((b"x-kvasir-brownout", FALLBACK.text.encode())) <= 1


async def test_a_request_that_no_model_can_serve_is_answered_as_always(edge: Any) -> None:
    edge.router.browned_out = FALLBACK
    reply = await edge.post("/v1/completions", b'{"model":"kvasir-tiny","prompt":"x","max_tokens":100000}')
    assert (reply.status, b"context_length_exceeded" in reply.body) == (400, True)
