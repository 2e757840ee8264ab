"""Streamed answers: one server-sent event per delta, written straight from the router's fan-out.

Nearly every delta is plain text of a choice that has begun; for it a frame is two constant pieces around
the escaped text. Everything else (roles, logprobs, ends) takes the slow road.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import msgspec

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, Usage
from kvasir_platform.gateway.answer import (
    FINISH,
    AnswerHead,
    chat_logprobs,
    completion_logprobs,
    usage_object,
)
from kvasir_platform.gateway.errors import error_body, error_headers, error_status
from kvasir_platform.gateway.http import Exchange

_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class _Shape(Protocol):
    """How one of the two APIs spells a chunk's choice."""

    object: str
    opening: ClassVar[dict[str, Any] | None]

    def before(self, index: int) -> bytes: ...

    def after(self) -> bytes: ...

    def choice(self, index: int, text: str) -> dict[str, Any]: ...

    def logprobs(self, index: int, delta: Delta, top: int) -> dict[str, Any]: ...


class ChatShape:
    """chat.completion.chunk."""

    object = "chat.completion.chunk"
    opening: ClassVar[dict[str, Any] | None] = {"role": "assistant", "content": ""}

    def before(self, index: int) -> bytes:
        return b'"choices":[{"index":%d,"delta":{"content":' % index

    def after(self) -> bytes:
        return b'},"finish_reason":null}]'

    def choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text} if text else {}}

    def logprobs(self, index: int, delta: Delta, top: int) -> dict[str, Any]:
        return chat_logprobs(delta.logprobs, top)


class CompletionShape:
    """text_completion. Keeps each choice's length of text, because offsets count from its start."""

    object = "text_completion"
    opening: ClassVar[dict[str, Any] | None] = None

    def __init__(self) -> None:
        self._offsets: dict[int, int] = {}

    def before(self, index: int) -> bytes:
        return b'"choices":[{"index":%d,"text":' % index

    def after(self) -> bytes:
        return b',"finish_reason":null}]'

    def choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text}

    def logprobs(self, index: int, delta: Delta, top: int) -> dict[str, Any]:
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(len(p.sampled.token) for p in delta.logprobs)
        return completion_logprobs(delta.logprobs, top, offset)


class StreamedAnswer:
    """One streamed answer. The headers leave with the first delta, so that an error before it still
    has a status. `timing` makes the Server-Timing line at that moment."""

    def __init__(
        self, exchange: Exchange, head: AnswerHead, shape: _Shape, timing: Callable[[], bytes]
    ) -> None:
        self._exchange = exchange
        self._head = head
        self._shape = shape
        self._timing = timing
        self._prefix = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,' % (
            _encode(head.id),
            _encode(shape.object),
            head.created,
            _encode(head.model),
        )
        self._usage_null = b',"usage":null' if head.include_usage else b""
        self._after = shape.after() + self._usage_null + b"}\n\n"
        self._before: list[bytes | None] = [None] * head.choices

    def delta(self, index: int, delta: Delta) -> None:
        """Send what a step added to choice `index`."""
        before = self._before[index]
        if before is not None and delta.finish is None and not delta.logprobs:
            if delta.text:
                self._exchange.frame(b"%b%b%b" % (before, _encode(delta.text), self._after))
            return
        frames = b""
        if before is None and self._shape.opening is not None:
            frames = self._frame({"index": index, "delta": self._shape.opening, "finish_reason": None})
        finish = None if delta.finish is None else FINISH.get(delta.finish)
        if delta.text or finish is not None or delta.logprobs:
            frames += self._frame(self._choice(index, delta, finish))
        if frames:
            # Only from here on, because the headers leave with the first frame.
            self._before[index] = self._prefix + self._shape.before(index)
            self._send(frames)

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Send usage if it was asked for, and the end."""
        last = _DONE
        if self._head.include_usage:
            last = b'%b"choices":[],"usage":%b}\n\n%b' % (self._prefix, _encode(usage_object(usage)), _DONE)
        if not self._exchange.streaming:
            self._exchange.begin(b"", timing)
        self._exchange.end(last)

    def fail(self, error: KvasirError) -> None:
        """Send the error as an event once the stream has begun, else as an answer of its own."""
        if self._exchange.streaming:
            self._exchange.end(b"data: %b\n\n" % error_body(error), close=True)
        else:
            self._exchange.fail(error_status(error), error, error_headers(error))

    def _choice(self, index: int, delta: Delta, finish: str | None) -> dict[str, Any]:
        choice = self._shape.choice(index, delta.text)
        if self._head.logprobs is not None:
            shown = self._shape.logprobs(index, delta, self._head.logprobs) if delta.logprobs else None
            choice["logprobs"] = shown
        choice["finish_reason"] = finish
        if delta.stop_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return choice

    def _frame(self, choice: dict[str, Any]) -> bytes:
        return b'%b"choices":[%b]%b}\n\n' % (self._prefix, _encode(choice), self._usage_null)

    def _send(self, frames: bytes) -> None:
        if self._exchange.streaming:
            self._exchange.frame(frames)
        else:
            self._exchange.begin(frames, self._timing())
