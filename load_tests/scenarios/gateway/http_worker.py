"""Workers that serve OpenAI's API over HTTP and generate one constant word, for the peers that proxy it.

They use as little CPU as Python allows: event bytes are built once, and one timer serves many streams.

    python -m load_tests.scenarios.gateway.http_worker 4

listens on that many ports of this machine, each a worker of its own, and prints them. {"groups": n} on its
standard input spreads later long answers of each worker over n times in a step.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from functools import partial
from typing import cast

import uvloop

from load_tests.scenarios.gateway.pacing import AT_ONCE, SHORT, SHORT_STEP_S, TOKEN, TOKENS_PER_S, Ticker

_PHASES = 20
"""Of all workers together, until others are asked for."""
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*(\d+)')
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(delta: dict[str, str], finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    event = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "bench",
        "choices": [choice],
    }
    return b"data: %b\n\n" % json.dumps(event, separators=(",", ":")).encode()


_FIRST = _HEAD + _chunk(_event({"role": "assistant", "content": TOKEN}, None))
_NEXT = _chunk(_event({"content": TOKEN}, None))
_LAST = _chunk(_event({"content": TOKEN}, "length") + b"data: [DONE]\n\n") + b"0\r\n\r\n"
_ONLY = _HEAD + _chunk(_event({"role": "assistant", "content": TOKEN}, "length") + b"data: [DONE]\n\n")
_ONLY += b"0\r\n\r\n"
_PAGE_BODY = json.dumps(
    {
        "status": "ok",
        "object": "list",
        "data": [{"id": "bench", "object": "model", "owned_by": "bench", "max_model_len": 200_000}],
        "model_path": "bench",
        "tokenizer_path": "bench",
        "served_model_name": "bench",
        "is_generation": True,
        "max_total_num_tokens": 10_000_000,
        "dp_size": 1,
        "tp_size": 1,
        "version": "0.5",
    }
).encode()
_PAGE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(_PAGE_BODY),
    _PAGE_BODY,
)


class Streams:
    """All running answers of a worker, by pacing."""

    def __init__(self, phases: int) -> None:
        self._short: set[Connection] = set()
        self._short_ticker = Ticker(lambda: self._step(self._short), SHORT_STEP_S)
        self.regroup(phases)

    def regroup(self, phases: int) -> None:
        """Spread later long answers over that many times in a step."""
        self._long: list[set[Connection]] = [set() for _ in range(phases)]
        self._tickers = [
            Ticker(lambda group=group: self._step(group), 1 / TOKENS_PER_S, at / phases / TOKENS_PER_S)  # type: ignore[misc]
            for at, group in enumerate(self._long)
        ]

    def add(self, stream: Connection, tokens: int) -> None:
        """Answer with that many tokens."""
        stream.left = tokens
        if tokens <= SHORT:
            stream.group = self._short
            self._short.add(stream)
            self._short_ticker.start()
            return
        at = min(range(len(self._long)), key=lambda phase: len(self._long[phase]))
        stream.group = self._long[at]
        stream.group.add(stream)
        self._tickers[at].start()

    @staticmethod
    def _step(group: set[Connection]) -> bool:
        for stream in [each for each in group if not each.step()]:
            group.discard(stream)
        return bool(group)


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._got = bytearray()
        self._missing = -1
        self._transport: asyncio.Transport | None = None
        self._started = False
        self.left = 0
        self.group: set[Connection] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's, but have the same methods.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.group.discard(self)

    def data_received(self, data: bytes) -> None:
        self._got += data
        while self._got:
            if self._missing < 0:
                end = self._got.find(b"\r\n\r\n")
                if end < 0:
                    return
                length = _LENGTH.search(self._got, 0, end + 2)
                self._missing = end + 4 + (int(length[1]) if length else 0)
                if length is None and self._got.startswith(b"POST"):
                    self._missing = self._chunked_end(end + 4)
                    if self._missing < 0:
                        return
            if len(self._got) < self._missing:
                return
            request = bytes(self._got[: self._missing])
            del self._got[: self._missing]
            self._missing = -1
            self._answer(request)

    def _chunked_end(self, start: int) -> int:
        end = self._got.find(b"0\r\n\r\n", start)
        return -1 if end < 0 else end + 5

    def step(self) -> bool:
        """Write the next token; return False after the last one or if the client disconnected."""
        if self._transport is None:
            return False
        self.left -= 1
        if self.left <= 0:
            self._transport.write(_LAST if self._started else _ONLY)
            return False
        self._transport.write(_NEXT if self._started else _FIRST)
        self._started = True
        return True

    def _answer(self, request: bytes) -> None:
        assert self._transport is not None
        if not request.startswith(b"POST /v1/"):
            self._transport.write(_PAGE)
            return
        found = _MAX_TOKENS.findall(request)
        tokens = int(found[-1]) if found else AT_ONCE
        self._started = False
        if tokens <= AT_ONCE:
            self._transport.write(_ONLY)
        else:
            self._streams.add(self, tokens)


async def _serve(ports: int) -> None:
    loop = asyncio.get_running_loop()
    workers = [Streams(max(1, _PHASES // ports)) for _ in range(ports)]
    servers = [
        await loop.create_server(partial(Connection, streams), "127.0.0.1", 0, backlog=1024)
        for streams in workers
    ]
    addresses = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    _say({"event": "serving", "addresses": addresses})
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        groups = int(json.loads(line)["groups"])
        for streams in workers:
            streams.regroup(groups)
        _say({"groups": groups})


def _say(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
