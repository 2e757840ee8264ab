"""Calls that the adapter makes to vLLM by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvasir.core.requests import (
    Constraint,
    EngineRequest,
    Leg,
    OutputParsing,
    Sampling,
    StructuredOutput,
    token_ids,
)

pytestmark = pytest.mark.slow


class Engine:
    """vLLM's front, with a connector or without; keeps what it is asked."""

    def __init__(self, connector: object) -> None:
        self.vllm_config = SimpleNamespace(kv_transfer_config=connector)
        self.asked: list[Any] = []

    async def generate(self, prompt: Any, params: Any, name: str, **_: Any) -> AsyncIterator[Any]:
        self.asked.append(params.extra_args)
        yield name


@pytest.mark.parametrize(
    ("connector", "extra"), [(None, None), (object(), {"kv_transfer_params": {"tiers": False}})]
)
def test_a_warm_up_leaves_tiers_alone_and_says_nothing_of_them_where_there_is_no_connector(
    connector: object, extra: dict[str, Any] | None
) -> None:
    """vLLM warns of every request with words for a connector that it has not."""
    pytest.importorskip("vllm")
    from kvasir_workers.engines.vllm.runtime import engine_runtime as runtime

    engine: Any = Engine(connector)
    asyncio.run(runtime.run_on_each_rank(engine, 2, [1], 1, "warm-up"))
    assert engine.asked == [extra, extra]


WANTED = Sampling(
    temperature=0.0,
    max_tokens=9,
    min_tokens=2,
    n=2,
    logprobs=3,
    prompt_logprobs=1,
    thinking_tokens=7,
    bad_words=("rain", "snow"),
    allowed_token_ids=(5, 6),
    spaces_between_special_tokens=False,
    structured=StructuredOutput(Constraint.REGEX, "a"),
)


def params_of(leg: Leg, prepared: Any = None, **changes: Any) -> Any:
    pytest.importorskip("vllm")
    from kvasir_workers.engines.vllm.runtime import engine_runtime as runtime

    request = EngineRequest(
        "r",
        token_ids([1, 2, 3]),
        replace(WANTED, temperature=1.0, **changes),
        leg=leg,
        parsing=OutputParsing(),
    )
    return runtime.sampling_params(request, lease_id="l", fence=1, lease_s=1.0, prepared=prepared)


def test_every_wish_reaches_vllm() -> None:
    made = params_of(Leg.FULL)
    assert (made.max_tokens, made.min_tokens, made.n) == (9, 2, 2)
    assert (made.logprobs, made.prompt_logprobs, made.thinking_token_budget) == (3, 1, 7)
    assert (made.bad_words, made.allowed_token_ids) == (["rain", "snow"], [5, 6])
    assert (made.skip_special_tokens, made.spaces_between_special_tokens) == (True, False)
    assert params_of(Leg.FULL, allowed_token_ids=()).allowed_token_ids is None


def test_a_prefill_leg_computes_the_prompt_and_nothing_else() -> None:
    made = params_of(Leg.PREFILL)
    assert (made.n, made.max_tokens, made.min_tokens) == (1, 1, 0)
    assert made.logprobs is made.prompt_logprobs is made.thinking_token_budget is None
    assert made.structured_outputs is None


def test_what_was_prepared_has_the_last_word() -> None:
    pytest.importorskip("vllm")
    from vllm.sampling_params import StructuredOutputsParams

    from kvasir_workers.engines.vllm.output.preparing import Prepared

    rule = StructuredOutputsParams(regex="b")
    prepared = Prepared(structured=rule, skip_special_tokens=False, reasoning_ended=True)
    made = params_of(Leg.DECODE, prepared)
    assert (made.structured_outputs, made.skip_special_tokens) == (rule, False)
    assert made.spaces_between_special_tokens is False
    assert prepared.arguments == {"reasoning_ended": True, "reasoning_parser_kwargs": None}
    assert Prepared(reasoning_ended=True).arguments == {}
