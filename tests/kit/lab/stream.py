"""A client that streams a completion and checks it against the expected answer.

The simulated model's tokens follow from the prompt alone, so a client computes the whole answer beforehand:
the text shows a token that was lost, repeated or changed, and the arrival times show where it stalled.
Prompts are sent as token ids, so that no tokenizer is involved.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import msgspec

from kvasir.core.requests import Sampling, token_ids
from kvasir.ports.clock import Clock
from kvasir_workers.engines.sim.model import Context, SimModel, sample

_GREEDY = Sampling(temperature=0.0, ignore_eos=True)
_NOTHING: frozenset[int] = frozenset()
_RESET = struct.pack("ii", 1, 0)
_ERROR_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Ask:
    """One greedy completion of exactly `tokens` tokens. `logprobs` enlarges every chunk of the answer;
    `headers` are whole lines, such as that of an API key."""

    prompt: tuple[int, ...]
    tokens: int
    model: str = "kvasir-tiny"
    logprobs: int | None = None
    headers: tuple[str, ...] = ()

    def body(self) -> bytes:
        """The body for /v1/completions."""
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
        return msgspec.json.encode(fields)


def expected_text(ask: Ask, engine_seed: int = 0) -> str:
    """The answer of simulated engines with that seed, computed without an engine."""
    model, context = SimModel(), Context(engine_seed, None, _GREEDY, 0)
    context.extend(token_ids(ask.prompt))
    words = []
    for _ in range(ask.tokens):
        token = sample(model, context, _GREEDY, _NOTHING)
        context.append(token)
        words.append("" if token == model.eos_token_id else model.text(token))
    return "".join(words)


@dataclass(slots=True)
class Outcome:
    """The result at one client. Times are readings of its clock. `error` is empty, a code of the gateway, or
    `refused`, `reset`, `cut` or `malformed` if the connection failed without one. `detail` is the gateway's
    error message, `retry_after_s` its retry time. `status` is 0 without an answer."""

    ask: Ask
    sent_s: float
    times_s: list[float] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] | None = None
    error: str = ""
    detail: str = ""
    request_id: str = ""
    status: int = 0
    retry_after_s: float | None = None
    ended_s: float | None = None

    @property
    def exact(self) -> bool:
        """Whether it got every token exactly once, and the usage agrees."""
        return (
            not self.error
            and self.finish == "length"
            and self.usage is not None
            and self.usage["completion_tokens"] == self.ask.tokens
            and self.usage["prompt_tokens"] == len(self.ask.prompt)
            and self.text == expected_text(self.ask)
        )

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token; infinite without any."""
        return self.times_s[0] - self.sent_s if self.times_s else math.inf

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two chunks; 0 with fewer than two."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return max((after - before for before, after in pairs), default=0.0)

    def gaps_s(self, start_s: float, end_s: float) -> list[float]:
        """The gaps between chunks whose first chunk arrived from `start_s` to before `end_s`."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return [after - before for before, after in pairs if start_s <= before < end_s]


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


class Stream(asyncio.Protocol):
    """One streamed completion on its own connection."""

    def __init__(self, host: str, ask: Ask, clock: Clock) -> None:
        self.outcome = Outcome(ask, clock.now())
        self.discard = False
        """Whether further data is discarded."""
        self.received_bytes = 0
        self.ended = asyncio.Event()
        self.begun = asyncio.Event()
        self._host = host
        self._clock = clock
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._pending = b""
        self._status = 0

    def disconnect(self) -> None:
        """Close in mid-stream, like a client whose process ends: the kernel sends RST for further data."""
        if self._transport is not None and not self.ended.is_set():
            sock = self._transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.outcome.error = "disconnected"
            self._transport.abort()

    def stop_reading(self) -> None:
        """Stop reading from the socket."""
        if self._transport is not None:
            self._transport.pause_reading()

    def read_on(self) -> None:
        """Undo `stop_reading`."""
        if self._transport is not None:
            self._transport.resume_reading()

    # -- asyncio's callbacks -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        body = self.outcome.ask.body()
        headers = "".join(f"{line}\r\n" for line in self.outcome.ask.headers)
        self.outcome.sent_s = self._clock.now()
        self._transport.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n"
            b"%bContent-Length: %d\r\nConnection: close\r\n\r\n%b"
            % (self._host.encode(), headers.encode(), len(body), body)
        )

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.outcome.detail = f"{error}: {data[:200]!r}"
            self._end("malformed")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("cut" if exc is None else "reset")

    # -- the parser's callbacks --------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self.outcome.request_id = value.decode("latin-1")
        elif name.lower() == b"retry-after":
            self.outcome.retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        self._status = self.outcome.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.received_bytes += len(body)
        if self.discard:
            return
        self._pending += body
        if self._status != 200:
            self._pending = self._pending[:_ERROR_BYTES]
            return
        *events, self._pending = self._pending.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                self._event(event[6:])

    def on_message_complete(self) -> None:
        if self._status != 200:
            self._fail(self._pending)
        self._end("cut")

    # -- inside ------------------------------------------------------------------------------------

    def _event(self, payload: bytes) -> None:
        outcome = self.outcome
        if payload == b"[DONE]":
            self._end("")
            return
        chunk = _CHUNK.decode(payload)
        if chunk.error is not None:
            outcome.error, outcome.detail = str(chunk.error.get("code")), str(chunk.error.get("message"))
        if chunk.usage is not None:
            outcome.usage = chunk.usage
        if chunk.choices:
            outcome.times_s.append(self._clock.now())
            outcome.text += chunk.choices[0].text
            outcome.finish = chunk.choices[0].finish_reason or outcome.finish
            self.begun.set()

    def _fail(self, body: bytes) -> None:
        self.outcome.error = f"http_{self._status}"
        with contextlib.suppress(msgspec.MsgspecError):
            error = _CHUNK.decode(body).error
            if error is not None:
                self.outcome.error, self.outcome.detail = str(error.get("code")), str(error.get("message"))

    def _end(self, error: str) -> None:
        if self.ended.is_set():
            return
        self.outcome.error = self.outcome.error or error
        self.outcome.ended_s = self._clock.now()
        self.begun.set()
        self.ended.set()
        if self._transport is not None:
            self._transport.close()


async def open_stream(address: str, ask: Ask, clock: Clock, receive_buffer: int | None = None) -> Stream:
    """Connect to `host:port` and send; a failed connection is an outcome too. `receive_buffer` bounds the
    kernel's receive buffer for a client that does not read (bytes)."""
    host, _, port = address.rpartition(":")
    stream = Stream(address, ask, clock)
    sock = socket.socket()
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await loop.sock_connect(sock, (host, int(port)))
        await loop.create_connection(lambda: stream, sock=sock)
    except OSError:
        sock.close()
        stream.outcome.error = "refused"
        stream.connection_lost(None)
    return stream


async def complete(address: str, ask: Ask, clock: Clock) -> Outcome:
    """Run one completion from beginning to end."""
    stream = await open_stream(address, ask, clock)
    try:
        await stream.ended.wait()
    finally:
        stream.disconnect()
    return stream.outcome
