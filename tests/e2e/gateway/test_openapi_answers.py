"""Responses and paths of the gateway match its OpenAPI document, field by field."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import jsonschema
from tests.kit.gateway.scripted_router import ScriptedStream

from kvasir.core.requests import (
    Delta,
    FinishReason,
    PositionLogprobs,
    Task,
    TokenLogprob,
    ToolCallDelta,
)
from kvasir_platform.gateway.batches.schema import BATCHES, FILES
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities
from kvasir_platform.gateway.console.site_files import CONSOLE

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Document = dict[str, Any]


def sealed(schema: Any) -> Any:
    """`schema` without leave for fields that it does not name."""
    if isinstance(schema, dict):
        closed = {key: sealed(each) for key, each in schema.items()}
        return {"additionalProperties": False, **closed} if "properties" in closed else closed
    return [sealed(each) for each in schema] if isinstance(schema, list) else schema


def check(document: Document, name: str, value: Any) -> None:
    schemas = {"schemas": sealed(document["components"]["schemas"])}
    schema = {"$ref": f"#/components/schemas/{name}", "components": schemas}
    jsonschema.Draft202012Validator(schema).validate(value)


def speak(stream: ScriptedStream) -> None:
    """Content, reasoning, a tool call and logprobs, in every choice, or a vector."""
    request = stream.request
    if request.task is Task.EMBED:
        stream.sink.on_delta(
            Delta(request.request_id, 0, (), "", embedding=array("f", [0.6, 0.8]), last=True)
        )
        stream.finish()
        return
    candidate = TokenLogprob(5, "a", -0.5)
    positions = (PositionLogprobs(candidate, (candidate, TokenLogprob(6, "b", float("-inf")))),)
    prompt = (None, *positions * (len(request.tokens) - 1))
    parsed = request.parsing is not None
    for index in range(request.sampling.n):
        for offset, text in enumerate(("Hel", "lo")):
            first = offset == 0
            stream.sink.on_delta(
                Delta(
                    request.request_id,
                    offset,
                    (5,),
                    text,
                    index,
                    positions if request.sampling.logprobs is not None else (),
                    finish=None if first else FinishReason.STOP,
                    stop_reason=None if first else "x",
                    reasoning="hm" if parsed else "",
                    tool_calls=(
                        (ToolCallDelta(0, "call_1" if first else "", "f" if first else "", "{}"),)
                        if parsed
                        else ()
                    ),
                    raw_length=4 if parsed else None,
                    reasoning_tokens=0 if first else 1,
                    prompt_logprobs=prompt if first and request.sampling.prompt_logprobs is not None else (),
                )
            )
    stream.finish(cached=1)


GOOD: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": USER}, "ChatCompletion"),
    (CHAT, {"messages": USER, "n": 2, "logprobs": True, "top_logprobs": 2}, "ChatCompletion"),
    (CHAT, {"messages": USER, "tools": [TOOL], "return_token_ids": True, "prompt_logprobs": 1},
     "ChatCompletion"),
    (CHAT, {"messages": USER, "functions": [TOOL["function"]]}, "ChatCompletion"),
    (CHAT, {"messages": USER, "stream": True}, "ChatChunk"),
    (CHAT, {"messages": USER, "stream": True, "n": 2, "logprobs": True, "return_token_ids": True,
            "tools": [TOOL], "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
     "ChatChunk"),
    (CHAT, {"messages": USER, "stream": True, "functions": [TOOL["function"]]}, "ChatChunk"),
    (TEXT, {"prompt": ["a", "b"]}, "CompletionResponse"),
    (TEXT, {"prompt": "a", "echo": True, "logprobs": 2, "max_tokens": 0}, "CompletionResponse"),
    (TEXT, {"prompt": "a b c", "echo": True, "logprobs": 2, "prompt_logprobs": 1,
            "return_token_ids": True}, "CompletionResponse"),
    (TEXT, {"prompt": "a", "stream": True, "echo": True, "logprobs": 1, "return_token_ids": True,
            "stream_options": {"include_usage": True}}, "CompletionResponse"),
    ("/v1/embeddings", {"input": "a"}, "Embeddings"),
    ("/v1/embeddings", {"input": [[5], [6]], "encoding_format": "base64"}, "Embeddings"),
    ("/tokenize", {"prompt": "a"}, "Tokens"),
    ("/tokenize", {"messages": USER, "return_token_strs": True}, "Tokens"),
    ("/detokenize", {"tokens": [5, 6]}, "Text"),
]  # fmt: skip


async def test_every_good_answer_is_as_documented(start: Callable[..., Any]) -> None:
    edge = await start(capabilities=ModelCapabilities(embeds=True, tools=True, reasoning=True))
    edge.router.script = speak
    document = json.loads((await edge.get("/openapi.json")).body)
    for path, body, name in GOOD:
        reply = await edge.post(path, json.dumps({"model": "kvasir-tiny", **body}).encode())
        assert reply.status == 200, (path, body, reply.body)
        if "stream" not in body:
            check(document, name, json.loads(reply.body))
            continue
        *events, done = [line[6:] for line in reply.body.decode().split("\n\n") if line]
        assert done == "[DONE]"
        for event in events:
            check(document, name, json.loads(event))


async def test_every_response_and_its_events_are_as_documented(start: Callable[..., Any]) -> None:
    edge = await start(capabilities=ModelCapabilities(tools=True, reasoning=True))
    edge.router.script = speak
    document = json.loads((await edge.get("/openapi.json")).body)
    tools = [{"type": "function", "name": "f"}]
    asked = {"model": "kvasir-tiny", "input": "hi", "top_logprobs": 2, "tools": tools}
    whole = json.loads((await edge.post("/v1/responses", json.dumps(asked).encode())).body)
    assert {item["type"] for item in whole["output"]} == {"message", "reasoning", "function_call"}
    stored = f"/v1/responses/{whole['id']}"
    check(document, "ResponseObject", whole)
    check(document, "ResponseObject", json.loads((await edge.get(stored)).body))
    check(document, "InputItemsPage", json.loads((await edge.get(f"{stored}/input_items")).body))
    deleted = await edge.raw(f"DELETE {stored} HTTP/1.1\r\nHost: t\r\n\r\n".encode())
    check(document, "ResponseDeleted", json.loads(deleted.body))
    streamed = await edge.post("/v1/responses", json.dumps({**asked, "stream": True}).encode())
    for block in streamed.body.decode().split("\n\n")[:-1]:
        check(document, "ResponseEvent", json.loads(block.partition("\ndata: ")[2]))


async def test_every_page_is_as_documented(edge: Any) -> None:
    document = json.loads((await edge.get("/openapi.json")).body)
    for path, name in (
        ("/v1/models", "Models"),
        ("/v1/models/kvasir-tiny", "Model"),
        ("/v1/models/pirate", "Model"),
        ("/health/live", "HealthResponse"),
        ("/health/ready", "HealthResponse"),
        ("/status", "StatusResponse"),
    ):
        check(document, name, json.loads((await edge.get(path)).body))


async def test_every_error_is_as_documented(edge: Any) -> None:
    document = json.loads((await edge.get("/openapi.json")).body)
    for reply in (
        await edge.post(CHAT, b"{"),
        await edge.post(CHAT, b'{"model": "gpt-9", "messages": [{"role": "user", "content": ""}]}'),
        await edge.get("/nowhere"),
        await edge.get(CHAT),
    ):
        check(document, "Error", json.loads(reply.body))
        assert f"Error{reply.status}" in document["components"]["responses"]


def code_of(error: dict[str, Any]) -> str:
    """The code in an error of either API."""
    return str(error["code"] if "code" in error else error["details"]["error_code"])


async def test_every_path_is_documented_and_every_documented_path_is_there(edge: Any) -> None:
    document = json.loads((await edge.get("/openapi.json")).body)
    # What the console reads is for its own pages, which are of the same version.
    routed = {path for path in edge.gateway._routes.by_path if not path.startswith(CONSOLE)} | {
        FILES,
        BATCHES,
    }
    documented = {path for path in document["paths"] if "{" not in path}
    assert documented == routed
    for path, methods in document["paths"].items():
        for method in methods:
            head = f"{method.upper()} {path.replace('{', '').replace('}', '')} HTTP/1.1\r\nHost: t\r\n"
            reply = await edge.raw(f"{head}Content-Length: 0\r\n\r\n".encode())
            code = code_of(json.loads(reply.body)["error"]) if reply.status >= 400 else ""
            assert code not in ("not_found", "method_not_allowed"), path
