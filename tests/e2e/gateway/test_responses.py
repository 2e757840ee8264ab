"""OpenAI's client uses the Responses API as its authors intended: whole, streamed, continued, in the
background."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from tests.kit.gateway.scripted_router import ScriptedStream

from kvasir.config.spec.tenants import DEFAULT_TENANT
from kvasir.core.errors import UpstreamError
from kvasir.core.requests import FinishReason, PositionLogprobs, TokenLogprob, ToolCallDelta
from kvasir.ports.responses import StoredResponse
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities

MODEL = "kvasir-tiny"
ABLE = ModelCapabilities(tools=True, reasoning=True)
RESPONSES = "/v1/responses"
TOOLS: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}]


def greeting(stream: ScriptedStream) -> None:
    """Two words."""
    stream.emit("Hello")
    stream.emit(" there", finish=FinishReason.STOP)
    stream.finish(cached=1)


def looking(stream: ScriptedStream) -> None:
    """Some thought, white space, and two calls in pieces."""
    stream.emit("", reasoning="Let me ")
    stream.emit("", reasoning="look.")
    stream.emit("\n\n")
    stream.emit("", tool_calls=(ToolCallDelta(0, "call_1", "look", '{"at":'),))
    stream.emit(
        "", tool_calls=(ToolCallDelta(0, arguments='"map"}'), ToolCallDelta(1, "call_2", "look", "{}"))
    )
    stream.emit("", finish=FinishReason.STOP, reasoning_tokens=2)
    stream.finish()


def prompt_of(edge: Any, number: int = -1) -> str:
    """The prompt of a request as the engine would see it."""
    model = edge.gateway._models.find(MODEL).model
    return str(model.tokenizer.decode(edge.router.streams[number].request.tokens))


async def test_a_response_has_text_usage_and_what_was_asked_for(start: Any) -> None:
    edge = await start()
    edge.router.script = greeting
    client = await edge.client()
    made = await client.responses.create(
        model=MODEL, input="Hi", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5
    )
    assert made.output_text == "Hello there"
    assert made.status == "completed"
    assert made.id.startswith("resp_")
    assert made.usage is not None
    assert made.usage.output_tokens == 2
    assert made.usage.input_tokens_details.cached_tokens == 1
    assert made.usage.total_tokens == made.usage.input_tokens + 2
    assert (made.instructions, made.metadata, made.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert made.error is None
    assert made.incomplete_details is None
    prompt = prompt_of(edge)
    assert prompt.index("Be brief.") < prompt.index("Hi")


@pytest.mark.parametrize("script", [greeting, looking], ids=["text", "calls"])
async def test_a_stream_ends_with_the_response_that_a_whole_one_is(start: Any, script: Any) -> None:
    edge = await start(capabilities=ABLE)
    edge.router.script = script
    client = await edge.client()
    asked: Any = {"model": MODEL, "input": "Hi", "tools": TOOLS}
    whole = (await client.responses.create(**asked)).to_dict()
    async with client.responses.stream(**asked) as stream:
        numbers = [event.sequence_number async for event in stream]
        final = await stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    streamed = final.to_dict()
    for answer in (whole, streamed):
        for name in ("id", "created_at", "completed_at"):
            del answer[name]
        for item in answer["output"]:
            del item["id"]
            item.pop("parsed_arguments", None)
            for part in item.get("content", ()):
                part.pop("parsed", None)
    assert streamed == whole


async def test_reasoning_and_calls_are_items_of_their_own(start: Any) -> None:
    edge = await start(capabilities=ABLE)
    edge.router.script = looking
    client = await edge.client()
    made = await client.responses.create(model=MODEL, input="Hi", tools=TOOLS)
    reasoning, first, second = made.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Let me look."
    assert first.type == second.type == "function_call"
    assert (first.call_id, first.name, first.arguments) == ("call_1", "look", '{"at":"map"}')
    assert (second.call_id, second.arguments) == ("call_2", "{}")
    assert made.usage is not None
    assert made.usage.output_tokens_details.reasoning_tokens == 2
    edge.router.script = greeting
    results: Any = [
        {"type": "function_call_output", "call_id": each.call_id, "output": f"seen {each.call_id}"}
        for each in (first, second)
    ]
    history: Any = [{"role": "user", "content": "Hi"}, *[item.to_dict() for item in made.output], *results]
    again = await client.responses.create(model=MODEL, input=history, tools=TOOLS)
    assert again.output_text == "Hello there"
    stateful = await client.responses.create(
        model=MODEL, previous_response_id=made.id, input=results, tools=TOOLS
    )
    assert stateful.previous_response_id == made.id
    assert prompt_of(edge, 2) == prompt_of(edge, 1)
    assert "seen call_2" in prompt_of(edge)


async def test_a_conversation_goes_on_by_id_and_is_gone_when_deleted(start: Any) -> None:
    edge = await start()
    edge.router.script = greeting
    client = await edge.client()
    first = await client.responses.create(model=MODEL, input="My name is Ada.", instructions="Be brief.")
    second = await client.responses.create(
        model=MODEL, input="What is my name?", previous_response_id=first.id
    )
    prompt = prompt_of(edge)
    assert prompt.index("Ada") < prompt.index("Hello there") < prompt.index("What is")
    assert "Be brief." not in prompt
    assert (await client.responses.retrieve(second.id)).to_dict() == second.to_dict()
    listed = await client.responses.input_items.list(second.id, order="asc")
    texts = [item.content[0].text for item in listed.data]
    assert texts == ["My name is Ada.", "Hello there", "What is my name?"]
    paged = client.responses.input_items.list(second.id, limit=2)
    assert [item.id async for item in paged] == [item.id for item in reversed(listed.data)]
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as missing:
        await client.responses.retrieve(first.id)
    assert missing.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as unknown:
        await client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
    assert (unknown.value.code, unknown.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )


async def test_items_are_sent_by_reference(start: Any) -> None:
    edge = await start(capabilities=ABLE)
    edge.router.script = looking
    client = await edge.client()
    first = await client.responses.create(model=MODEL, input="Where?", tools=TOOLS)
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "here"}
        for item in first.output
        if item.type == "function_call"
    ]
    asked: Any = {"role": "user", "content": "Where?"}
    whole: Any = [asked, *[item.to_dict() for item in first.output], *results]
    refer: Any = [asked, *[{"type": "item_reference", "id": item.id} for item in first.output], *results]
    edge.router.script = greeting
    for history in (whole, refer):
        second = await client.responses.create(model=MODEL, input=history, tools=TOOLS)
    assert prompt_of(edge, 1) == prompt_of(edge, 2)
    again: Any = [*refer, {"id": second.output[0].id}, {"role": "user", "content": "And?"}]
    await client.responses.create(model=MODEL, input=again)
    assert "Hello there" in prompt_of(edge)
    await client.responses.delete(first.id)
    await client.responses.create(model=MODEL, input=again)
    for unknown in ("msg_1", f"msg_{'0' * 32}00"):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": unknown}])
        assert (missing.value.code, missing.value.param) == ("response_not_found", "input[0].id")


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "Hi", "previous_response_id": f"resp_{'0' * 32}"},
        {"input": [{"id": f"msg_{'0' * 32}i00"}, {"role": "user", "content": "Hi"}]},
    ],
    ids=["continued", "referred to"],
)
async def test_a_long_stored_conversation_is_rendered_in_a_thread(
    start: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    edge = await start()
    pool = edge.gateway._models.find(MODEL).model.tokenizers
    threaded: list[str] = []
    later = pool.later

    def noted(work: Any, *rest: Any) -> None:
        threaded.append(repr(work))
        later(work, *rest)

    monkeypatch.setattr(pool, "later", noted)
    said = {"id": f"msg_{'0' * 32}i00", "role": "user", "content": "x " * 200_000}
    stored = StoredResponse(DEFAULT_TENANT, f"resp_{'0' * 32}", b'{"output":[]}', json.dumps([said]).encode())
    edge.gateway._served.responses._store.put(stored)
    reply = await edge.post(RESPONSES, json.dumps({"model": MODEL, **fields}).encode())
    assert json.loads(reply.body)["error"]["code"] == "context_length_exceeded"
    assert any("_rendered" in work for work in threaded)


async def test_an_input_refers_to_a_bounded_number_of_responses(start: Any) -> None:
    edge = await start()
    edge.router.script = greeting
    refer = []
    for number in range(33):
        name = f"{number:032x}"
        refer.append({"id": f"msg_{name}i00"})
        items = json.dumps([{"id": f"msg_{name}i00", "role": "user", "content": "Hi"}]).encode()
        edge.gateway._served.responses._store.put(
            StoredResponse(DEFAULT_TENANT, f"resp_{name}", b'{"output":[]}', items)
        )
    for asked, status in ((refer[:32], 200), (refer, 400)):
        reply = await edge.post(RESPONSES, json.dumps({"model": MODEL, "input": asked}).encode())
        assert reply.status == status
    assert "more than 32 responses" in json.loads(reply.body)["error"]["message"]


async def test_what_is_not_to_be_stored_is_not(start: Any) -> None:
    edge = await start()
    edge.router.script = greeting
    client = await edge.client()
    made = await client.responses.create(model=MODEL, input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)


async def test_without_a_store_what_needs_it_is_refused(start: Any) -> None:
    edge = await start(responses={"max_responses": 0})
    edge.router.script = greeting
    client = await edge.client()
    made = await client.responses.create(model=MODEL, input="Hi", store=True)
    assert made.to_dict()["store"] is False
    for field in ({"previous_response_id": made.id}, {"background": True}):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model=MODEL, input="Hi", **field)
        assert refused.value.code == "unsupported_parameter"
        assert refused.value.param in field
    with pytest.raises(openai.NotFoundError) as missing:
        await client.responses.retrieve(made.id)
    assert "stores no responses" in str(missing.value)


async def test_a_response_that_reaches_its_limit_is_incomplete(start: Any) -> None:
    edge = await start()

    def cut(stream: ScriptedStream) -> None:
        stream.emit("Hel", finish=FinishReason.LENGTH)
        stream.finish()

    edge.router.script = cut
    client = await edge.client()
    made = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=1)
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.output[0].status == "incomplete"
    assert edge.router.streams[0].request.sampling.max_tokens == 1
    events = [e async for e in await client.responses.create(model=MODEL, input="Hi", stream=True)]
    assert events[-1].type == "response.incomplete"


async def test_an_error_in_a_stream_is_a_failed_response(start: Any) -> None:
    edge = await start()

    def broken(stream: ScriptedStream) -> None:
        stream.emit("Hel")
        stream.fail(UpstreamError("The worker died.", code="worker_lost"))

    edge.router.script = broken
    client = await edge.client()
    events = [e async for e in await client.responses.create(model=MODEL, input="Hi", stream=True)]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    assert "worker_lost" in last.response.error.message
    with pytest.raises(openai.APIStatusError) as whole:
        await client.responses.create(model=MODEL, input="Hi")
    assert whole.value.status_code == 502
    assert whole.value.code == "worker_lost"


async def test_logprobs_are_in_the_text(start: Any) -> None:
    edge = await start()

    def sure(stream: ScriptedStream) -> None:
        stream.emit("Hi", logprobs=(PositionLogprobs(TokenLogprob(1, "Hi", -0.5)),), finish=FinishReason.STOP)
        stream.finish()

    edge.router.script = sure
    client = await edge.client()
    made = await client.responses.create(
        model=MODEL, input="Hi", include=["message.output_text.logprobs"], top_logprobs=2
    )
    text = made.output[0].content[0]
    assert text.logprobs[0].token == "Hi"
    assert edge.router.streams[0].request.sampling.logprobs == 2


class Answer(BaseModel):
    """What a model is to say."""

    word: str


async def test_structured_output_is_parsed(start: Any) -> None:
    edge = await start()

    def structured(stream: ScriptedStream) -> None:
        stream.emit('{"word":"hi"}', finish=FinishReason.STOP)
        stream.finish()

    edge.router.script = structured
    client = await edge.client()
    made = await client.responses.parse(model=MODEL, input="Hi", text_format=Answer)
    assert made.output_parsed == Answer(word="hi")
    rule = edge.router.streams[0].request.sampling.structured
    assert "word" in json.loads(rule.spec)["properties"]


async def test_a_background_response_is_polled(start: Any) -> None:
    edge = await start()
    client = await edge.client()
    made = await client.responses.create(model=MODEL, input="Hi", background=True)
    assert made.status == "queued"
    stream = await edge.router.submitted()
    assert (await client.responses.retrieve(made.id)).status == "queued"
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model=MODEL, input="x", previous_response_id=made.id)
    item: Any = {"type": "item_reference", "id": made.id.replace("resp_", "msg_") + "00"}
    with pytest.raises(openai.BadRequestError) as early:
        await client.responses.create(model=MODEL, input=[item])
    assert early.value.param == "input[0].id"
    greeting(stream)
    done = await client.responses.retrieve(made.id)
    assert done.status == "completed"
    assert done.background
    assert done.output_text == "Hello there"
    assert (await client.responses.cancel(made.id)).status == "completed"
    edge.router.script = greeting
    foreground = await client.responses.create(model=MODEL, input="Hi")
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(foreground.id)


async def test_a_cancelled_background_response_leaves_its_worker(start: Any) -> None:
    edge = await start(responses={"max_background": 1})
    client = await edge.client()
    made = await client.responses.create(model=MODEL, input="Hi", background=True)
    stream = await edge.router.submitted()
    with pytest.raises(openai.RateLimitError) as full:
        await client.responses.create(model=MODEL, input="Hi", background=True)
    assert full.value.code == "background_limit"
    assert (await client.responses.cancel(made.id)).status == "cancelled"
    assert edge.router.cancelled == [stream.request.request_id]
    assert (await client.responses.retrieve(made.id)).status == "cancelled"
    again = await client.responses.create(model=MODEL, input="Hi", background=True)
    await client.responses.delete(again.id)
    assert len(await edge.router.cancels(2)) == 2


async def test_a_background_response_that_cannot_begin_is_an_error_at_once(start: Any) -> None:
    edge = await start()
    edge.router.refusal = UpstreamError("No.", code="no_workers")
    client = await edge.client()
    with pytest.raises(openai.InternalServerError) as refused:
        await client.responses.create(model=MODEL, input="Hi", background=True)
    assert refused.value.code == "no_workers"
    assert not edge.gateway._served.responses._running


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        (
            {"tools": [{"type": "web_search", "search_context_size": "low"}]},
            "tools[0].type",
            "unsupported_parameter",
        ),
        ({"input": [{"type": "computer_call", "action": {}}]}, "input[0].type", "unsupported_parameter"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "missing_parameter"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "unsupported_modality",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0].type",
            "unsupported_modality",
        ),
        (
            {"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "invalid_value",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "input[0].content[0].file_id",
            "unsupported_parameter",
        ),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_parameter"),
        ({"input": []}, "input", "invalid_value"),
        ({"conversation": "c"}, "conversation", "unsupported_parameter"),
        ({"colour": "red"}, "colour", "unknown_parameter"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_parameter"),
        ({"service_tier": "flex"}, "service_tier", "unsupported_parameter"),
        ({"max_output_tokens": 1 << 20}, "input", "context_length_exceeded"),
        ({"include": ["everything"]}, "include[0]", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "http://x"}}}},
            "text.format.schema",
            "invalid_value",
        ),
    ],
)
async def test_errors_name_the_field_of_the_body(start: Any, fields: Any, param: str, code: str) -> None:
    edge = await start()
    body = {"model": MODEL, "input": "Hi", **fields}
    reply = await edge.post(RESPONSES, json.dumps(body).encode())
    error = json.loads(reply.body)["error"]
    assert (reply.status, error["param"], error["code"]) == (400, param, code), error
