"""Anthropic's client against the gateway: messages, streams, tools, counts, errors, keys and models."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest
from tests.kit.gateway.scripted_router import ScriptedStream

from kvasir.config.spec.filters import OutputFiltersSpec
from kvasir.core.errors import CapacityError, UpstreamError
from kvasir.core.requests import FinishReason, ToolCallDelta
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities

Start = Callable[..., Awaitable[Any]]
MODEL = "kvasir-tiny"
USER: Any = [{"role": "user", "content": "Who is there?"}]
ASKED: Any = {"model": MODEL, "max_tokens": 32, "messages": USER}
TOOL: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SERVER_TOOL = {"type": "web_search_20250305", "name": "web_search", "max_uses": 1}
TALKING = ModelCapabilities(tools=True, reasoning=True)


async def connect(edge: Any, **options: Any) -> anthropic.AsyncAnthropic:
    """Anthropic's own client, pointed at the gateway, without retries."""
    options = {"api_key": "secret", "max_retries": 0, **options}
    made = anthropic.AsyncAnthropic(base_url=f"http://{edge.host}:{edge.port}", **options)
    client: anthropic.AsyncAnthropic = await edge.clients.enter_async_context(made)
    return client


def echo(stream: ScriptedStream) -> None:
    for text in ("Hello", ", ", "wör", "ld"):
        stream.emit(text)
    stream.emit("", finish=FinishReason.STOP)
    stream.finish(cached=2)


def calls(stream: ScriptedStream) -> None:
    """Think, speak, and call the tool."""
    stream.emit("", reasoning="Hm.")
    stream.emit("Let me see.")
    stream.emit("", tool_calls=(ToolCallDelta(0, "call_1", "weather"),))
    for piece in ('{"city": ', '"Oslo"}'):
        stream.emit("", tool_calls=(ToolCallDelta(0, arguments=piece),))
    stream.emit("", finish=FinishReason.STOP, reasoning_tokens=1)
    stream.finish()


async def test_a_message_has_text_usage_and_a_reason(edge: Any) -> None:
    edge.router.script = echo
    client = await connect(edge)
    message = await client.messages.create(
        **ASKED,
        system="Be brief.",
        stop_sequences=["END"],
        metadata={"user_id": "u"},
        extra_body={"temperature": 0.5, "top_k": 40},
    )
    request = edge.router.streams[0].request
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello, wörld"}]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, MODEL)
    assert message.usage.input_tokens == len(request.tokens) - 2
    assert message.usage.cache_read_input_tokens == 2
    assert message.usage.output_tokens == 5
    assert message.id == f"msg_{message._request_id}"
    assert (request.sampling.max_tokens, request.sampling.stop) == (32, ("END",))
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 40)
    assert request.session.endswith("u")


async def test_a_streamed_message_equals_the_whole_one(edge: Any) -> None:
    edge.router.script = echo
    client = await connect(edge)
    whole = await client.messages.create(**ASKED)
    async with client.messages.stream(**ASKED) as stream:
        pieces = [text async for text in stream.text_stream]
        streamed = await stream.get_final_message()
    assert pieces == ["Hello", ", ", "wör", "ld"]
    assert streamed.content[0].to_dict() == whole.content[0].to_dict()
    assert streamed.usage.to_dict() == whole.usage.to_dict()
    assert streamed.stop_reason == whole.stop_reason


@pytest.mark.parametrize("streams", [False, True])
async def test_thinking_and_calls_come_as_blocks(start: Start, streams: bool) -> None:
    edge = await start(capabilities=TALKING)
    edge.router.script = calls
    client = await connect(edge)
    fields: Any = {**ASKED, "tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    if streams:
        async with client.messages.stream(**fields) as stream:
            message: Any = await stream.get_final_message()
    else:
        message = await client.messages.create(**fields)
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "Hm.", message.id)
    assert text.text == "Let me see."
    assert (call.type, call.id, call.name, call.input) == ("tool_use", "call_1", "weather", {"city": "Oslo"})
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details.thinking_tokens == 1
    assert edge.router.streams[0].request.sampling.thinking_tokens == 1024


async def test_a_turn_goes_back_with_the_results_of_its_calls(start: Start) -> None:
    edge = await start(capabilities=TALKING)
    edge.router.script = calls
    client = await connect(edge)
    message = await client.messages.create(**ASKED, tools=[TOOL])
    edge.router.script = echo
    results: Any = [{"type": "tool_result", "tool_use_id": "call_1", "content": "rain", "is_error": False}]
    turns = [*USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    answer = await client.messages.create(model=MODEL, max_tokens=8, messages=turns, tools=[TOOL])
    assert answer.content
    first, second = (len(stream.request.tokens) for stream in edge.router.streams)
    assert second > first


async def test_more_output_than_the_context_has_room_for_is_less_output(edge: Any) -> None:
    def goes_on(stream: ScriptedStream) -> None:
        stream.emit("a", finish=FinishReason.LENGTH)
        stream.finish()

    edge.router.script = goes_on
    client = await connect(edge)
    asked = {**ASKED, "max_tokens": 64000, "stream": False}
    message = await client.messages.create(**asked, timeout=60)
    request = edge.router.streams[0].request
    context = (await client.models.retrieve(MODEL)).max_tokens
    assert request.sampling.max_tokens + len(request.tokens) == context
    assert message.stop_reason == "model_context_window_exceeded"


async def test_a_count_is_that_of_the_prompt(start: Start) -> None:
    edge = await start(capabilities=TALKING)
    edge.router.script = echo
    client = await connect(edge)
    shared: Any = {"model": MODEL, "messages": USER, "system": "Be brief.", "tools": [TOOL]}
    counted = await client.messages.count_tokens(**shared)
    await client.messages.create(**shared, max_tokens=8)
    assert counted.input_tokens == len(edge.router.streams[0].request.tokens)
    assert len(edge.router.streams) == 1


@pytest.mark.parametrize(
    ("fields", "kind", "name"),
    [
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"model": "claude"}, anthropic.NotFoundError, "not_found_error"),
        ({"messages": [{"role": "user", "content": "a " * 9000}]}, anthropic.BadRequestError, "too long"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            anthropic.BadRequestError,
            "web_",
        ),
        ({"tools": [TOOL]}, anthropic.BadRequestError, "engine.tool_parser"),
    ],
)
async def test_an_error_has_the_clients_type(
    edge: Any, fields: Any, kind: type[Exception], name: str
) -> None:
    client = await connect(edge)
    with pytest.raises(kind, match=name) as caught:
        await client.messages.create(**{**ASKED, **fields})
    error: Any = caught.value
    assert error.request_id
    assert error.body["request_id"] == error.request_id
    assert error.error_code


async def test_an_overload_is_overloaded_before_a_stream_and_within(edge: Any) -> None:
    client = await connect(edge)
    edge.router.refusal = CapacityError("full", code="queue_full", retry_after_s=2.0)
    with pytest.raises(anthropic.InternalServerError) as caught:
        await client.messages.create(**ASKED)
    assert (caught.value.status_code, caught.value.type) == (503, "overloaded_error")
    assert caught.value.response.headers["retry-after"] == "2"
    edge.router.refusal = None

    def breaks(stream: ScriptedStream) -> None:
        stream.emit("Hel")
        stream.fail(UpstreamError("the worker died", code="worker_lost"))

    edge.router.script = breaks
    events = aiter(await client.messages.create(**ASKED, stream=True))
    heard = [(await anext(events)).type for _ in range(3)]
    assert heard == ["message_start", "content_block_start", "content_block_delta"]
    with pytest.raises(anthropic.APIStatusError, match="the worker died") as broken:
        await anext(events)
    assert broken.value.type == "api_error"


async def test_a_filter_that_ends_a_message_is_a_refusal(start: Start) -> None:
    found = {"name": "cards", "patterns": [r"\d{4}-\d{4}"], "act": "end"}
    edge = await start(deployed={"output_filters": OutputFiltersSpec.model_validate({"regex": [found]})})

    def says(stream: ScriptedStream) -> None:
        for text in ("The number is 12", "34-567", "8."):
            stream.emit(text)

    edge.router.script = says
    client = await connect(edge)
    async with client.messages.stream(**ASKED) as stream:
        message = await stream.get_final_message()
    assert (message.stop_reason, message.content[0].to_dict()["text"]) == ("refusal", "The number is ")


async def test_a_client_that_leaves_frees_its_request(edge: Any) -> None:
    edge.router.script = lambda stream: stream.emit("a")
    client = await connect(edge)
    async with client.messages.stream(**ASKED) as stream:
        async for _ in stream.text_stream:
            break
    assert await edge.router.cancels() == [edge.router.streams[0].request.request_id]


@pytest.fixture
def keys(tmp_path: Path) -> str:
    file = tmp_path / "keys"
    file.write_text(hashlib.sha256(b"secret").hexdigest() + "\n")
    return str(file)


async def test_a_key_is_taken_from_either_header_on_these_paths_only(
    start: Start, keys: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    edge = await start(api_keys_file=keys)
    edge.router.script = echo
    for options in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
        client = await connect(edge, **options)
        assert (await client.messages.create(**ASKED)).content
        assert (await client.messages.count_tokens(model=MODEL, messages=USER)).input_tokens
        assert MODEL in [model.id async for model in client.models.list()]
    stranger = await connect(edge, api_key="sk-other")
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await stranger.messages.create(**ASKED)
    assert refused.value.type == "authentication_error"
    assert "sk-other" not in caplog.text + str(refused.value.body)
    body = json.dumps({"model": MODEL, "messages": USER}).encode()
    assert (await edge.post("/v1/chat/completions", body, "x-api-key: secret\r\n")).status == 401
    assert (await edge.get("/v1/models", "x-api-key: secret\r\n")).status == 200
    assert (await edge.get("/status", "x-api-key: secret\r\n")).status == 401


async def test_models_have_the_form_of_the_client_that_asks(edge: Any) -> None:
    client = await connect(edge)
    page = await client.models.list()
    assert [model.id for model in page.data] == [MODEL, "pirate"]
    assert not page.has_next_page()
    shown = await client.models.retrieve("pirate")
    assert (shown.type, shown.display_name, shown.lifecycle) == ("model", "pirate", "active")
    assert shown.max_input_tokens == shown.max_tokens
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.models.retrieve("claude")
    assert unknown.value.type == "not_found_error"
    assert json.loads((await edge.get("/v1/models")).body)["object"] == "list"


async def test_refusals_of_the_head_have_the_form_of_the_path(edge: Any) -> None:
    for data, code in (
        (b"GET /v1/messages HTTP/1.1\r\nHost: t\r\n\r\n", "method_not_allowed"),
        (b"POST /v1/messages/batches HTTP/1.1\r\nHost: t\r\nContent-Length: 0\r\n\r\n", "not_found"),
        (b"POST /v1/messages HTTP/1.1\r\nContent-Length: 0\r\n\r\n", "missing_host"),
        (b"POST /v1/messages?beta=true HTTP/1.1\r\nHost: t\r\nX: " + b"a" * 70_000, "headers_too_large"),
    ):
        reply = await edge.raw(data)
        error = json.loads(reply.body)
        assert (error["type"], error["error"]["details"]["error_code"]) == ("error", code)
        assert reply.headers["request-id"] == error["request_id"]


async def test_messages_are_counted_as_other_requests_are(edge: Any) -> None:
    edge.router.script = echo
    client = await connect(edge)
    await client.messages.create(**ASKED)
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**{**ASKED, "model": "claude"})
    page = (await edge.get("/metrics")).body.decode().splitlines()
    assert any(line.startswith("kvasir_requests_total{") and 'outcome="ok"' in line for line in page)
    assert any(line.startswith("kvasir_requests_total{") and "model_not_found" in line for line in page)
