"""Responses take the one path of requests: tenants, limits, filters and the client's leaving hold as for
chats."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvasir.config.spec.filters import OutputFiltersSpec
from kvasir.config.spec.tenants import TenancySpec, TenantSpec
from kvasir.core.requests import FinishReason

MODEL = "kvasir-tiny"
TENANTS = (
    TenantSpec(name="one"),
    TenantSpec(name="two"),
    TenantSpec(name="few", requests_per_min=1),
    TenantSpec(name="narrow", models=("pirate",)),
)
FILTER = {"name": "cards", "patterns": [r"\d{4}-\d{4}"], "act": "end"}


def answered(stream: Any) -> None:
    stream.emit("Ahoy", finish=FinishReason.STOP)
    stream.finish()


@pytest.fixture
async def edge(start: Any, tmp_path: Path) -> Any:
    """A gateway where each tenant's key is its name."""
    keys = tmp_path / "keys"
    lines = [f"{hashlib.sha256(each.name.encode()).hexdigest()} tenant={each.name}\n" for each in TENANTS]
    keys.write_text("".join(lines))
    edge = await start(api_keys_file=str(keys), deployed={"tenancy": TenancySpec(tenants=TENANTS)})
    edge.router.script = answered
    return edge


async def test_a_response_is_its_tenants_own(edge: Any) -> None:
    one, two = await edge.client(api_key="one"), await edge.client(api_key="two")
    made = await one.responses.create(model=MODEL, input="Hi")
    assert (await one.responses.retrieve(made.id)).id == made.id
    for foreign in (two.responses.retrieve, two.responses.delete, two.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            await foreign(made.id)
    with pytest.raises(openai.BadRequestError):
        await two.responses.create(model=MODEL, input="Hi", previous_response_id=made.id)
    assert (await one.responses.retrieve(made.id)).id == made.id
    with pytest.raises(openai.AuthenticationError):
        await (await edge.client(api_key="none")).responses.retrieve(made.id)


async def test_limits_count_responses(edge: Any) -> None:
    few = await edge.client(api_key="few")
    await few.responses.create(model=MODEL, input="Hi")
    with pytest.raises(openai.RateLimitError) as refused:
        await few.responses.create(model=MODEL, input="Hi", background=True)
    assert refused.value.code == "rate_limit_requests"
    assert refused.value.response.headers["x-ratelimit-limit-requests"] == "1"
    with pytest.raises(openai.NotFoundError) as unknown:
        await (await edge.client(api_key="narrow")).responses.create(model=MODEL, input="Hi")
    assert unknown.value.code == "model_not_found"


async def test_filters_end_a_response(start: Any) -> None:
    edge = await start(deployed={"output_filters": OutputFiltersSpec.model_validate({"regex": [FILTER]})})

    def says(stream: Any) -> None:
        for text in ("My card is 12", "34-567", "8 you see"):
            stream.emit(text)
        stream.emit(".", finish=FinishReason.STOP)
        stream.finish()

    edge.router.script = says
    client = await edge.client()
    whole = await client.responses.create(model=MODEL, input="Hi")
    events = [e async for e in await client.responses.create(model=MODEL, input="Hi", stream=True)]
    for made in (whole, events[-1].response):
        assert made.status == "incomplete"
        assert made.incomplete_details.reason == "content_filter"
        assert made.output_text == "My card is "


async def test_a_stream_whose_client_leaves_frees_its_worker_and_is_not_stored(start: Any) -> None:
    edge = await start()
    client = await edge.client()

    def begins(stream: Any) -> None:
        stream.emit("Ahoy")

    edge.router.script = begins
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True)
    first = await anext(stream)
    await stream.close()
    await edge.router.cancels()
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.response.id)


async def test_methods_and_origins_of_the_paths(start: Any) -> None:
    edge = await start(cors={"origins": ["https://chat.example"]})
    path = "/v1/responses/resp_1"
    asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "DELETE"}
    async with httpx.AsyncClient(base_url=f"http://{edge.host}:{edge.port}") as browser:
        shown = await browser.options(path, headers=asked)
    assert "DELETE" in shown.headers["access-control-allow-methods"]
    for method, at, allowed in (
        ("PUT", path, "GET, HEAD, DELETE, OPTIONS"),
        ("GET", f"{path}/cancel", "POST, OPTIONS"),
        ("POST", f"{path}/input_items", "GET, HEAD, OPTIONS"),
        ("DELETE", "/v1/responses", "POST, OPTIONS"),
    ):
        reply = await edge.raw(f"{method} {at} HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n".encode())
        assert (reply.status, reply.headers["allow"]) == (405, allowed)
    streamed = await edge.get(f"{path}?stream=true")
    assert json.loads(streamed.body)["error"]["param"] == "stream"
