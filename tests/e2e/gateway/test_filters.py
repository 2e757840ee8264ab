"""Output filters over HTTP: filtered text reaches no client, streamed or not, and the request is released."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvasir.config.spec.filters import OutputFiltersSpec
from kvasir.core.requests import FinishReason, Usage

Start = Callable[..., Awaitable[Any]]
SAID = ["The number is 12", "34-567", "8 and no", " more."]


def deployed(act: str) -> dict[str, Any]:
    found = {"name": "cards", "patterns": [r"\d{4}-\d{4}"], "act": act}
    return {"output_filters": OutputFiltersSpec.model_validate({"regex": [found]})}


async def streamed(edge: Any, **fields: Any) -> tuple[str, str | None, Any]:
    client = await edge.client()
    text, reason, usage = "", None, None
    async for chunk in await client.completions.create(
        model="kvasir-tiny", prompt="hi", stream=True, stream_options={"include_usage": True}, **fields
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.text
            reason = choice.finish_reason or reason
    return text, reason, usage


async def whole(edge: Any, **fields: Any) -> tuple[str, str | None, Any]:
    client = await edge.client()
    answer = await client.completions.create(model="kvasir-tiny", prompt="hi", **fields)
    return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage


def says(stream: Any) -> None:
    for text in SAID[:-1]:
        stream.emit(text)
    stream.emit(SAID[-1], finish=FinishReason.STOP)
    stream.finish()


@pytest.mark.parametrize("ask", [streamed, whole])
async def test_what_is_found_is_redacted_and_the_rest_comes_through(start: Start, ask: Any) -> None:
    edge = await start(deployed=deployed("redact"))
    edge.router.script = says
    text, reason, usage = await ask(edge)
    assert (text, reason) == ("The number is [redacted] and no more.", "stop")
    assert usage.completion_tokens == len(SAID)
    page = (await edge.get("/metrics")).body.decode()
    assert [line for line in page.splitlines() if line.startswith("kvasir_output_filter_acts_total")] == [
        'kvasir_output_filter_acts_total{act="redacted",filter="cards"} 1.0'
    ]


@pytest.mark.parametrize("ask", [streamed, whole])
async def test_a_choice_ends_before_what_is_found_and_its_worker_is_freed(start: Start, ask: Any) -> None:
    edge = await start(deployed=deployed("end"))

    def goes_on(stream: Any) -> None:
        stream.emit(SAID[0], usage=Usage(len(stream.request.tokens), cached_tokens=1, output_tokens=1))
        for text in SAID[1:]:
            stream.emit(text)

    edge.router.script = goes_on
    text, reason, usage = await ask(edge)
    assert (text, reason) == ("The number is ", "content_filter")
    assert await edge.router.cancels() == [edge.router.streams[0].request.request_id]
    # Those that the engine made, also after the end, until it was told.
    assert usage.completion_tokens == len(SAID)
    assert usage.prompt_tokens_details.cached_tokens == 1


async def test_a_gateway_that_stops_lets_an_answer_that_waits_for_a_ruling_end(start: Start) -> None:
    edge = await start(deployed=deployed("redact"), drain_timeout_s=5.0)
    edge.router.script = None
    reader, writer = await edge.connect()
    body = json.dumps({"model": "kvasir-tiny", "prompt": "hi"}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    stream = await edge.router.submitted()
    stream.emit("The number is 12")
    edge.gateway.stop()
    says(stream)
    reply = await edge.read(reader)
    assert json.loads(reply.body)["choices"][0]["text"].endswith("[redacted] and no more.")
    await edge.serving
