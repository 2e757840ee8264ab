"""Every kind of bad input gets an error in OpenAI's format, and other streams are not affected."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import jinja2
import pytest
from tests.kit.models.tiny_tokens import VOCABULARY

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Any:
    return {"model": "kvasir-tiny", "messages": USER, **fields}


def text(**fields: Any) -> Any:
    return {"model": "kvasir-tiny", "prompt": "hi", **fields}


def part(**fields: Any) -> Any:
    return chat(messages=[{"role": "user", "content": [fields]}])


BAD: list[tuple[str, str, Any, int, str, str | None]] = [
    ("truncated", CHAT, b'{"model": "kvasir-tiny", "mess', 400, "invalid_json", None),
    ("empty body", CHAT, b"", 400, "invalid_json", None),
    ("not utf-8", CHAT, b'{"model": "\xff"}', 400, "invalid_json", None),
    ("lone surrogate", TEXT, b'{"model":"kvasir-tiny","prompt":"\\ud800"}', 400, "invalid_json", None),
    ("trailing text", CHAT, b"{} x", 400, "missing_parameter", "model"),
    ("an array", CHAT, [], 400, "invalid_type", None),
    ("deep nesting", CHAT, b"[" * 100_000, 400, "body_too_complex", None),
    ("no model", CHAT, {"messages": USER}, 400, "missing_parameter", "model"),
    ("no messages", CHAT, {"model": "kvasir-tiny"}, 400, "missing_parameter", "messages"),
    ("no prompt", TEXT, {"model": "kvasir-tiny"}, 400, "missing_parameter", "prompt"),
    ("unknown model", CHAT, chat(model="gpt-9"), 404, "model_not_found", "model"),
    ("model not a string", CHAT, chat(model=4), 400, "invalid_type", "model"),
    ("unknown field", CHAT, chat(temprature=1), 400, "unknown_parameter", "temprature"),
    ("unknown text field", TEXT, text(messages=USER), 400, "unknown_parameter", "messages"),
    ("unknown nested", CHAT, chat(stream_options={"x": 1}), 400, "unknown_parameter", "stream_options.x"),
    ("empty messages", CHAT, chat(messages=[]), 400, "invalid_value", "messages"),
    ("messages a string", CHAT, chat(messages="hi"), 400, "invalid_type", "messages"),
    ("bad role", CHAT, chat(messages=[{"role": "wizard", "content": ""}]), 400, "invalid_value",
     "messages[0].role"),
    ("no content", CHAT, chat(messages=[*USER, {"role": "user"}]), 400, "missing_parameter",
     "messages[1].content"),
    ("image", CHAT, part(type="image_url", image_url={"url": "http://x/y.png"}), 400,
     "unsupported_modality", "messages[0].content[0].type"),
    ("audio", CHAT, part(type="input_audio", input_audio={"data": "", "format": "wav"}), 400,
     "unsupported_modality", "messages[0].content[0].type"),
    ("audio out", CHAT, chat(modalities=["text", "audio"]), 400, "unsupported_modality", "modalities"),
    ("odd part", CHAT, part(type="smell"), 400, "invalid_value", "messages[0].content[0].type"),
    ("part without text", CHAT, part(type="text"), 400, "missing_parameter",
     "messages[0].content[0].text"),
    ("tool calls", CHAT, chat(messages=[{"role": "assistant", "content": "", "tool_calls": [{}]}]), 400,
     "missing_parameter", "messages[0].tool_calls[0].id"),
    ("tools", CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400,
     "unsupported_parameter", "tools"),
    ("no such format", CHAT, chat(response_format={"type": "xml"}), 400, "invalid_value",
     "response_format.type"),
    ("echo in a chat", CHAT, chat(echo=True), 400, "unsupported_parameter", "echo"),
    ("best_of", TEXT, text(best_of=3), 400, "unsupported_parameter", "best_of"),
    ("temperature high", CHAT, chat(temperature=2.1), 400, "invalid_value", "temperature"),
    ("temperature low", CHAT, chat(temperature=-0.1), 400, "invalid_value", "temperature"),
    ("temperature text", CHAT, chat(temperature="hot"), 400, "invalid_type", "temperature"),
    ("temperature NaN", TEXT, b'{"model":"kvasir-tiny","prompt":"a","temperature":NaN}', 400,
     "invalid_json", None),
    ("top_p zero", CHAT, chat(top_p=0), 400, "invalid_value", "top_p"),
    ("top_k negative", CHAT, chat(top_k=-2), 400, "invalid_value", "top_k"),
    ("min_p", CHAT, chat(min_p=1.5), 400, "invalid_value", "min_p"),
    ("presence", CHAT, chat(presence_penalty=3), 400, "invalid_value", "presence_penalty"),
    ("frequency", CHAT, chat(frequency_penalty=-3), 400, "invalid_value", "frequency_penalty"),
    ("repetition", CHAT, chat(repetition_penalty=0), 400, "invalid_value", "repetition_penalty"),
    ("n zero", CHAT, chat(n=0), 400, "invalid_value", "n"),
    ("n a bool", CHAT, chat(n=True), 400, "invalid_type", "n"),
    ("n huge", CHAT, chat(n=129), 400, "invalid_value", "n"),
    ("n greedy", CHAT, chat(n=2, temperature=0), 400, "invalid_value", "n"),
    ("n times prompts", TEXT, text(n=64, prompt=["a", "b", "c"]), 400, "invalid_value", "n"),
    ("max_tokens zero", CHAT, chat(max_tokens=0), 400, "invalid_value", "max_tokens"),
    ("max_tokens float", CHAT, chat(max_tokens=1.5), 400, "invalid_type", "max_tokens"),
    ("min over max", CHAT, chat(max_tokens=2, min_tokens=3), 400, "invalid_value", "min_tokens"),
    ("seed huge", CHAT, chat(seed=2**70), 400, "invalid_value", "seed"),
    ("stop empty", CHAT, chat(stop=""), 400, "invalid_value", "stop"),
    ("stop many", CHAT, chat(stop=["x"] * 17), 400, "invalid_value", "stop"),
    ("stop ids", CHAT, chat(stop_token_ids=[VOCABULARY]), 400, "invalid_value", "stop_token_ids"),
    ("bias key", CHAT, chat(logit_bias={"the": 1}), 400, "invalid_value", "logit_bias"),
    ("bias key beyond", CHAT, chat(logit_bias={str(VOCABULARY): 1}), 400, "invalid_value", "logit_bias"),
    ("bias value", CHAT, chat(logit_bias={"1": 101}), 400, "invalid_value", "logit_bias"),
    ("top_logprobs alone", CHAT, chat(top_logprobs=2), 400, "invalid_value", "top_logprobs"),
    ("top_logprobs many", CHAT, chat(logprobs=True, top_logprobs=21), 400, "invalid_value",
     "top_logprobs"),
    ("logprobs a number", CHAT, chat(logprobs=2), 400, "invalid_type", "logprobs"),
    ("options unstreamed", CHAT, chat(stream_options={"include_usage": True}), 400, "invalid_value",
     "stream_options"),
    ("template override", CHAT, chat(chat_template_kwargs={"messages": []}), 400, "invalid_value",
     "chat_template_kwargs.messages"),
    ("prompt mixed", TEXT, text(prompt=["a", 1]), 400, "invalid_type", "prompt"),
    ("prompt empty", TEXT, text(prompt=[]), 400, "invalid_value", "prompt"),
    ("prompts many", TEXT, text(prompt=["a"] * 65), 400, "invalid_value", "prompt"),
    ("token id negative", TEXT, text(prompt=[-1]), 400, "invalid_value", "prompt[0]"),
    ("token id beyond", TEXT, text(prompt=[VOCABULARY]), 400, "invalid_value", "prompt"),
    ("too long", TEXT, text(prompt=[5] * 4096), 400, "context_length_exceeded", "prompt"),
    ("too long text", CHAT, chat(messages=[{"role": "user", "content": "x " * 9000}]), 400,
     "context_length_exceeded", "messages"),
    ("too much output", TEXT, text(max_tokens=4096), 400, "context_length_exceeded", "prompt"),
]  # fmt: skip


async def test_bad_input_is_named_and_other_streams_go_on(edge: Any) -> None:
    client = await edge.client()
    asking = asyncio.create_task(
        client.chat.completions.create(model="kvasir-tiny", messages=USER, stream=True)
    )
    other = await edge.router.submitted()
    other.emit("a")
    stream = await asking
    for name, path, body, status, code, param in BAD:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = await edge.post(path, data)
        error = json.loads(reply.body)["error"]
        assert (name, reply.status, error["code"], error["param"]) == (name, status, code, param)
        assert error["message"], name
        assert error["type"] == "invalid_request_error", name
        assert len(reply.headers["x-request-id"]) == 24, name
        other.emit("b")
    other.finish()
    got = [chunk.choices[0].delta.content async for chunk in stream]
    assert "".join(text or "" for text in got) == "a" + "b" * len(BAD)
    assert len(edge.router.streams) == 1


async def test_a_context_error_tells_the_numbers(edge: Any) -> None:
    reply = await edge.post(TEXT, json.dumps(text(prompt=[5] * 4000, max_tokens=100)).encode())
    message = json.loads(reply.body)["error"]["message"]
    assert all(number in message for number in ("4096", "4000", "100"))


async def test_an_output_limit_that_nobody_names_fits_the_context(edge: Any) -> None:
    edge.router.script = lambda stream: stream.finish()
    for length, expected in ((10, 256), (4090, 6)):
        await edge.post(TEXT, json.dumps(text(prompt=[5] * length)).encode())
        assert edge.router.streams[-1].request.sampling.max_tokens == expected


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        ("GET /nowhere HTTP/1.1\r\nHost: t\r\n", 404, "not_found"),
        ("GET /v1/chat/completions HTTP/1.1\r\nHost: t\r\n", 405, "method_not_allowed"),
        ("DELETE /v1/models HTTP/1.1\r\nHost: t\r\n", 405, "method_not_allowed"),
        ("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: text/plain\r\nContent-Length: 0\r\n", 415,
         "unsupported_media_type"),
        ("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n", 415,
         "unsupported_media_type"),
    ],
)  # fmt: skip
async def test_a_wrong_path_method_or_type_is_told(edge: Any, head: str, status: int, code: str) -> None:
    reply = await edge.raw(f"{head}\r\n".encode())
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (status, code)
    if status == 405:
        assert reply.headers["allow"] in {"GET, HEAD, OPTIONS", "POST, OPTIONS"}


async def test_a_fault_of_ours_is_answered_without_its_inside(edge: Any) -> None:
    def broken() -> str:
        raise ZeroDivisionError("secret detail")

    edge.router.refusing_reason = broken
    reply = await edge.get("/health/ready")
    assert reply.status == 500
    assert json.loads(reply.body)["error"]["code"] == "internal_error"
    assert b"secret" not in reply.body
    assert (await edge.get("/health/live")).status == 200


async def test_a_conversation_of_many_messages_is_rendered_in_a_thread(
    edge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    render = jinja2.Template.render

    def noted(*arguments: Any, **options: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(*arguments, **options)

    monkeypatch.setattr(jinja2.Template, "render", noted)
    few, many = ([{"role": "user", "content": f"{i}"} for i in range(count)] for count in (2, 600))
    for number, messages in enumerate((few, many), 1):
        body = json.dumps({"model": "kvasir-tiny", "messages": messages, "max_tokens": 1}).encode()
        asked = asyncio.create_task(edge.post("/v1/chat/completions", body))
        stream = await edge.router.submitted(number)
        stream.finish()
        assert (await asked).status == 200
        reply = await edge.post("/tokenize", json.dumps({"messages": messages}).encode())
        assert json.loads(reply.body)["count"] == len(stream.request.tokens)
    assert [name.startswith("tokenize") for name in threads] == [False, False, True, True]
    bad = json.dumps({"model": "kvasir-tiny", "messages": many, "chat_template": "{{"}).encode()
    reply = await edge.post("/v1/chat/completions", bad)
    assert (reply.status, json.loads(reply.body)["error"]["param"]) == (400, "chat_template")
