"""Streamed answers: one server-sent event per delta, written directly from the router's fan-out.

Nearly every delta is plain text of a choice that has begun; its frame is the escaped text between two
constant pieces. All others (roles, reasoning, tool calls, logprobs, ends) are encoded as JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import msgspec

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, ToolCallDelta, Usage
from kvasir.native import StreamGaps
from kvasir.ports.router import Lane
from kvasir_platform.gateway.catalog.slo_classes import TIMING_HEADER
from kvasir_platform.gateway.http.exchange import Exchange, HttpRequest
from kvasir_platform.gateway.openai.answer import (
    AnswerHead,
    Positions,
    chat_logprobs,
    completion_logprobs,
    finish_reason,
    prompt_ids,
    prompt_logprobs,
    stop_reason,
    usage_object,
    wanted_calls,
    without_output,
)
from kvasir_platform.gateway.openai.lagging_text import LaggingText

_DONE = b"data: [DONE]\n\n"
_TIMING_HEADER = TIMING_HEADER.encode()
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Progress:
    """Progress of one choice's stream. `offset` is where the next token begins in its text; `prompt` has the
    logprobs of its prompt, once received."""

    index: int
    begun: bool = False
    called: bool = False
    offset: int = 0
    tokens: int = 0
    reasoning_tokens: int = 0
    prompt: Positions = ()


class _Shape(Protocol):
    """The format of chunks in one of the two APIs."""

    object: str

    def before(self, index: int) -> bytes:
        """Return the bytes before the text of a chunk that has only text."""
        ...

    def after(self) -> bytes:
        """Return the bytes after it."""
        ...

    def opening(self, head: AnswerHead, at: _Progress, *, first: bool) -> dict[str, Any] | None:
        """Return the fields of the chunk before a choice's first; `first`: before all of them."""
        ...

    def choice(self, head: AnswerHead, at: _Progress, delta: Delta) -> dict[str, Any] | None:
        """Return a delta as a chunk's choice, without its end; None if there is nothing to show."""
        ...


class ChatShape:
    """chat.completion.chunk."""

    object = "chat.completion.chunk"

    def before(self, index: int) -> bytes:
        return b'"choices":[{"index":%d,"delta":{"content":' % index

    def after(self) -> bytes:
        return b'},"finish_reason":null}]'

    def opening(self, head: AnswerHead, at: _Progress, *, first: bool) -> dict[str, Any] | None:
        # With a parsed output, content may never arrive; it is null then.
        content = "" if head.parsing is None else None
        role = {"role": "assistant", "content": content}
        shown: dict[str, Any] = {"choices": [{"index": at.index, "delta": role, "finish_reason": None}]}
        if first and head.return_token_ids:
            shown["prompt_token_ids"] = prompt_ids(head, at.index)
        if first and head.prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_logprobs(at.prompt, head)
        return shown

    def choice(self, head: AnswerHead, at: _Progress, delta: Delta) -> dict[str, Any] | None:
        said: dict[str, Any] = {}
        if delta.reasoning and not head.hides_reasoning:
            said["reasoning"] = said["reasoning_content"] = delta.reasoning
        if delta.text:
            said["content"] = delta.text
        if delta.tool_calls and (calls := wanted_calls(head, delta.tool_calls)):
            at.called = True
            if head.legacy_functions:
                said["function_call"] = _joined(calls)
            else:
                said["tool_calls"] = _pieces(calls)
        logprobs = chat_logprobs(delta.logprobs, head) if delta.logprobs else None
        shows_ids = head.shows_token_ids and delta.token_ids
        if not (said or logprobs or shows_ids or delta.finish is not None):
            return None
        shown: dict[str, Any] = {"index": at.index, "delta": said}
        if head.logprobs is not None:
            shown["logprobs"] = logprobs
        if shows_ids:
            shown["token_ids"] = delta.token_ids
        return shown


class CompletionShape:
    """text_completion."""

    object = "text_completion"

    def before(self, index: int) -> bytes:
        return b'"choices":[{"index":%d,"text":' % index

    def after(self) -> bytes:
        return b',"finish_reason":null}]'

    def opening(self, head: AnswerHead, at: _Progress, *, first: bool) -> dict[str, Any] | None:
        return None

    def choice(self, head: AnswerHead, at: _Progress, delta: Delta) -> dict[str, Any] | None:
        text, positions = delta.text, cast(Positions, delta.logprobs)
        shown: dict[str, Any] = {"index": at.index, "text": text}
        if not at.begun:
            if head.echo:
                prompt = head.prompts[head.prompt_of(at.index)]
                shown["text"] = text = prompt.text + text
                at.offset = 0 if at.prompt else len(prompt.text)
                positions = (*at.prompt, *positions)
            if head.return_token_ids:
                shown["prompt_token_ids"] = prompt_ids(head, at.index)
            if head.prompt_logprobs is not None:
                shown["prompt_logprobs"] = prompt_logprobs(at.prompt, head)
        logprobs = None
        if positions:
            logprobs, at.offset = completion_logprobs(positions, head, at.index, at.offset)
        if head.shows_token_ids:
            shown["token_ids"] = delta.token_ids
        if not (text or logprobs or len(shown) > 2 or delta.finish is not None):
            return None
        if head.logprobs is not None:
            shown["logprobs"] = logprobs
        return shown


class StreamedAnswer:
    """One streamed answer. The headers are sent with the first delta, so that an earlier error has an HTTP
    status. `timing` makes the Server-Timing line at that moment; the final one follows as a trailer if the
    client accepts trailers, or as a comment if it requests one.

    While the client lags, plain pieces of a choice are held and sent as one chunk to reduce its backlog.
    """

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
        self._begun: list[bytes | None] = [None] * head.choices
        """The bytes before the text of a choice that has begun and has only text."""
        self._plain = self._begun
        """The same while the client keeps up."""
        self._lags = False
        self._held = LaggingText()
        self._open = head.choices
        self._last = b""
        """Frames of the last delta, which are sent together with the end."""
        self._progress: list[_Progress | None] = [None] * head.choices
        self._prompts: list[Positions] = [()] * len(head.prompts)
        self._only_text = (
            head.logprobs is None
            and not head.return_token_ids
            and not head.continuous_usage
            and not head.prompt_only
        )
        self._trailers = takes_trailers(exchange.request)

    def delta(self, index: int, delta: Delta) -> None:
        """Send what a step added to choice `index`."""
        before = self._plain[index]
        if before is not None and delta.finish is None:
            if delta.text:
                self._exchange.piece(before, delta.text, self._after)
            return
        self._general_delta(index, delta)

    def lane(self, index: int, gaps: StreamGaps) -> Lane | None:
        """See Answer.lane."""
        before = self._plain[index]
        return None if before is None else self._exchange.lane(before, self._after, gaps)

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Send usage, if requested, and the end."""
        exchange, head = self._exchange, self._head
        if self._lags:
            self._held.let_go()
        last = _DONE
        if timing and exchange.streaming and not self._trailers and wants_comment(exchange.request):
            last = b": %b\n\n%b" % (timing.strip(), last)
        if head.include_usage:
            known = [at.reasoning_tokens for at in self._progress if at is not None]
            total = replace(usage, output_tokens=0) if head.prompt_only else usage
            shown = usage_object(total, None if head.parsing is None else sum(known))
            last = b'%b"choices":[],"usage":%b}\n\n%b' % (self._prefix, _encode(shown), last)
        last = self._last + last
        if not exchange.streaming:
            exchange.begin(b"", timing)
            exchange.end(last)
        else:
            exchange.end(last, trailers=timing if self._trailers else b"")

    def fail(self, error: KvasirError) -> None:
        """Send the error as an event if the stream has begun, else as an error response."""
        self._held.let_go()
        if self._exchange.streaming:
            event = self._exchange.errors.event(error, self._exchange.request_id)
            self._exchange.end(self._last + event, close=True)
        else:
            self._exchange.fail(error)

    def _general_delta(self, index: int, delta: Delta) -> None:
        """As `delta`, for any content."""
        head, at = self._head, self._progress[index]
        if at is None:
            at = self._progress[index] = self._start(index, delta)
        elif at.begun and self._only_text and delta.finish is None and self._send_part(at, delta):
            return
        if self._lags:
            self._held.let_go()
        at.tokens += len(delta.token_ids)
        if head.prompt_only:
            delta = without_output(delta)
        if delta.finish is not None:
            at.reasoning_tokens = delta.reasoning_tokens
            self._open -= 1
        if frames := self._opening(at) + self._chunk(at, delta):
            # Not earlier: the headers are sent with the first frame.
            at.begun = True
            if self._only_text and head.parsing is None:
                self._begun[index] = self._prefix + self._shape.before(index)
            if delta.last and not self._open and self._exchange.streaming:
                # The end follows in the same turn, and each write is a system call.
                self._last = frames
            else:
                self._send(frames)

    def _opening(self, at: _Progress) -> bytes:
        if at.begun:
            return b""
        chunk = self._shape.opening(self._head, at, first=not self._exchange.streaming)
        return b"" if chunk is None else self._frame(chunk, at)

    def _chunk(self, at: _Progress, delta: Delta) -> bytes:
        choice = self._shape.choice(self._head, at, delta)
        if choice is None:
            return b""
        choice["finish_reason"] = finish_reason(self._head, delta.finish, at.called)
        if delta.stop_reason is not None:
            choice["stop_reason"] = stop_reason(self._head, delta.stop_reason)
        return self._frame({"choices": [choice]}, at)

    def _start(self, index: int, delta: Delta) -> _Progress:
        at = _Progress(index)
        if self._prompts:
            prompt = self._head.prompt_of(index)
            if delta.prompt_logprobs:
                self._prompts[prompt] = delta.prompt_logprobs
            at.prompt = self._prompts[prompt]
        return at

    def _send_part(self, at: _Progress, delta: Delta) -> bool:
        """Send a delta that carries only content or only reasoning; return False for any other."""
        if delta.tool_calls or (delta.text and delta.reasoning):
            return False
        reasoning = bool(delta.reasoning)
        text = delta.reasoning if reasoning else delta.text
        if not text or (reasoning and self._head.hides_reasoning):
            return True
        if self._lags:
            send = partial(self._send_text, at.index, reasoning)
            self._held.hold(at.index, reasoning, text, send)
        else:
            self._send_text(at.index, reasoning, text)
        return True

    def _send_text(self, index: int, reasoning: bool, text: str) -> None:
        if not reasoning:
            self._exchange.piece(self._prefix + self._shape.before(index), text, self._after)
            return
        shown = _encode(text)
        delta = b'%b"choices":[{"index":%d,"delta":{"reasoning":%b,"reasoning_content":%b%b'
        self._exchange.frame(delta % (self._prefix, index, shown, shown, self._after))

    def _lagging(self) -> None:
        self._lags = True
        self._plain = [None] * len(self._begun)

    def _caught_up(self) -> None:
        self._lags = False
        self._plain = self._begun
        # A write may report that the client lags again; the rest is then queued at the connection.
        self._held.let_go()

    def _frame(self, chunk: dict[str, Any], at: _Progress) -> bytes:
        usage = self._usage_null
        if self._head.continuous_usage:
            shown = Usage(
                prompt_tokens=len(self._head.prompts[self._head.prompt_of(at.index)].tokens),
                output_tokens=0 if self._head.prompt_only else at.tokens,
            )
            usage = b',"usage":%b' % _encode(usage_object(shown))
        return b"%b%b%b}\n\n" % (self._prefix, _encode(chunk)[1:-1], usage)

    def _send(self, frames: bytes) -> None:
        if self._exchange.streaming:
            self._exchange.frame(frames)
        else:
            trailer = b"trailer: server-timing\r\n" if self._trailers else b""
            self._exchange.on_lagging = self._lagging
            self._exchange.on_caught_up = self._caught_up
            self._exchange.begin(frames, self._timing() + trailer)


def takes_trailers(request: HttpRequest) -> bool:
    """Return whether the client accepts trailers of a chunked response."""
    te = request.headers.get(b"te")
    if te is None or not request.chunked:
        return False
    return b"trailers" in [part.partition(b";")[0].strip().lower() for part in te.split(b",")]


def wants_comment(request: HttpRequest) -> bool:
    """Return whether the client wants the final Server-Timing as a comment of the stream."""
    return request.headers.get(_TIMING_HEADER, b"").strip().lower() == b"comment"


def _pieces(calls: list[ToolCallDelta]) -> list[dict[str, Any]]:
    """Return one fragment per call; clients join them by index across chunks."""
    shown: dict[int, dict[str, Any]] = {}
    for call in calls:
        piece = shown.get(call.index)
        if piece is None:
            piece = shown[call.index] = {"index": call.index, "function": {"arguments": ""}}
        if call.name:
            piece |= {"id": call.call_id, "type": "function"}
            piece["function"] = {"name": call.name, "arguments": piece["function"]["arguments"]}
        piece["function"]["arguments"] += call.arguments
    return list(shown.values())


def _joined(calls: list[ToolCallDelta]) -> dict[str, Any]:
    """Return the fragments of one call in the format of the older API."""
    shown: dict[str, Any] = _pieces(calls)[0]["function"]
    return shown
