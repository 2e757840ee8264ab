"""A server that speaks OpenAI's API from a script: what it refuses, how long it takes, what it counts.

    python -m tests.kit.openai_server --port 8100 --first-ms 80 --gap-ms 12

serves a paced model by itself, for load generators to measure. A prompt has a token for each word, and five
for its template. Times have a lognormal spread from a seeded source.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

TEMPLATE_TOKENS = 5
MODEL = "scripted"


@dataclass
class ScriptedAnswer:
    """What comes of one request. `status` other than 200 answers with `message`. A stream pauses with `wait`
    before each chunk, which is given its number, and breaks off before chunk `breaks_at`. A refusal says to
    ask again after `retry_after_s` seconds."""

    status: int = 200
    message: str = "refused"
    breaks_at: int | None = None
    error_event: bool = False
    ends: bool = True
    retry_after_s: int | None = None


@dataclass
class OpenAiScript:
    """How the server behaves. `answer` decides by the body; `wait` is awaited before each chunk, with the
    number of the chunk and of the request. `refused` are fields that it answers with 400 to."""

    answer: Callable[[Mapping[str, Any]], ScriptedAnswer] = lambda _: ScriptedAnswer()
    wait: Callable[[int, int], Awaitable[None]] | None = None
    refused: frozenset[str] = frozenset()
    counts: bool = True
    context: int | None = 4096
    models: tuple[str, ...] = (MODEL,)
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)


@contextlib.asynccontextmanager
async def serving_openai(script: OpenAiScript, port: int = 0) -> AsyncIterator[str]:
    """Serve on this machine; give the URL."""
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await _exchange(script, reader, writer):
                pass
        writer.close()
        connections.discard(task)

    server = await asyncio.start_server(connected, "127.0.0.1", port, limit=64 << 20, backlog=4096)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tuple(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await server.wait_closed()


async def _exchange(script: OpenAiScript, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Answer one request; False ends the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
    }
    method, path, _ = first.split(" ")
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    if script.key is not None and headers.get("authorization") != f"Bearer {script.key}":
        _plain(writer, 401, {"error": {"message": "a key is missing"}})
        return True
    if method == "GET":
        listed = [{"id": name, "object": "model", "max_model_len": script.context} for name in script.models]
        _plain(writer, 200, {"object": "list", "data": listed})
        return True
    if not body:
        _plain(writer, 404, {"error": {"message": f"no {path}"}})
        return True
    asked = json.loads(body)
    script.bodies.append(asked)
    del script.bodies[:-1000]
    answer = script.answer(asked)
    refused = script.refused & asked.keys()
    if refused:
        answer = ScriptedAnswer(400, f"unknown field {min(refused)}")
    if answer.status != 200:
        _plain(writer, answer.status, {"error": {"message": answer.message}}, answer.retry_after_s)
        return True
    if path.endswith("/embeddings"):
        usage = {"prompt_tokens": len(asked["input"].split()) + TEMPLATE_TOKENS}
        _plain(writer, 200, {"data": [{"embedding": [0.0]}], "usage": usage if script.counts else None})
        return True
    return await _stream(script, answer, asked, writer)


async def _stream(
    script: OpenAiScript, answer: ScriptedAnswer, asked: Mapping[str, Any], writer: asyncio.StreamWriter
) -> bool:
    number = len(script.bodies)
    chat = "messages" in asked
    prompt = asked["messages"][0]["content"] if chat else asked["prompt"]
    count = asked.get("max_tokens") or asked.get("max_completion_tokens") or 16
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    head = {
        "id": f"cmpl-{number}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 0,
        "model": asked["model"],
    }
    if chat:
        _event(writer, {**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    if answer.error_event:
        _event(writer, {"error": {"message": "the worker was lost"}})
    for place in range(count):
        if place == answer.breaks_at:
            await writer.drain()
            return False
        if script.wait is not None:
            await script.wait(place, number)
        text = {"delta": {"content": " a"}} if chat else {"text": " a"}
        _event(writer, {**head, "choices": [{"index": 0, **text}]})
        await writer.drain()
    end: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    _event(writer, {**head, "choices": [{"index": 0, **end, "finish_reason": "length"}]})
    if script.counts and (asked.get("stream_options") or {}).get("include_usage"):
        tokens = len(prompt.split()) + TEMPLATE_TOKENS
        usage = {"prompt_tokens": tokens, "completion_tokens": count, "total_tokens": tokens + count}
        _event(writer, {**head, "choices": [], "usage": usage})
    if answer.ends:
        _chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True


def _plain(
    writer: asyncio.StreamWriter, status: int, value: Mapping[str, Any], retry_after_s: int | None = None
) -> None:
    body = json.dumps(value).encode()
    later = "" if retry_after_s is None else f"Retry-After: {retry_after_s}\r\n"
    head = (
        f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{later}Content-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)


def _event(writer: asyncio.StreamWriter, value: Mapping[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def serve_paced(port: int, first_s: float, gap_s: float, sigma: float, seed: int) -> None:
    """Serve until it is cancelled: chunks come after `first_s` and then every `gap_s`, both times a lognormal
    factor with the median 1 for each request."""

    def factor(*key: int) -> float:
        return random.Random(str((seed, *key))).lognormvariate(0.0, sigma)

    async def wait(place: int, number: int) -> None:
        if place:
            await asyncio.sleep(gap_s * factor(number, 1))
        else:
            await asyncio.sleep(first_s * factor(number))

    async with serving_openai(OpenAiScript(wait=wait, context=8192), port) as url:
        sys.stdout.write(f"ready at {url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def main() -> None:
    """Serve by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-ms", type=float, default=80.0)
    parser.add_argument("--gap-ms", type=float, default=12.0)
    parser.add_argument("--sigma", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve_paced(args.port, args.first_ms / 1e3, args.gap_ms / 1e3, args.sigma, args.seed))


if __name__ == "__main__":
    main()
