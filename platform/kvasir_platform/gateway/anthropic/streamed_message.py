"""A streamed message: blocks of thinking, text and calls, one open at a time, in Anthropic's events.

Nearly every delta is plain text for a block of text that is open; its event is the escaped text between two
constant pieces, so that it can take the fast path. All others are encoded from their types.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from functools import partial

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, ToolCallDelta, Usage
from kvasir.native import StreamGaps
from kvasir.ports.router import Lane
from kvasir_platform.gateway.anthropic.answers import (
    BlockPiece,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputPiece,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageStopReason,
    OutputBlock,
    PingEvent,
    SignaturePiece,
    TextOutput,
    TextPiece,
    ThinkingOutput,
    ThinkingPiece,
    ToolUseOutput,
    event_frame,
    message_stop,
    message_usage,
)
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.answer import AnswerHead, wanted_calls
from kvasir_platform.gateway.openai.event_stream import EventStream

_BEFORE = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":'
)
_AFTER = b"}}\n\n"


class _Open(Enum):
    """The kind of the block that is open."""

    NONE = auto()
    TEXT = auto()
    THINKING = auto()
    CALL = auto()


class StreamedMessage:
    """One streamed message. `timing` makes the Server-Timing line of the head.

    Text and reasoning that come after a call began wait for the end: the call's block may not be over, and
    blocks of a message do not overlap. They are bounded by the output limit of the request.
    """

    def __init__(self, exchange: Exchange, head: AnswerHead, timing: Callable[[], bytes]) -> None:
        self._stream = EventStream(exchange, timing)
        self._head = head
        self._begun = False
        self._open = _Open.NONE
        self._index = -1
        self._before: bytes | None = None
        """The bytes before the text of an event, while a block of text is open."""
        self._call = -1
        """The number of the last call that began."""
        self._late: list[Callable[[], bytes]] = []
        self._last = b""
        """Events of the last delta, which are sent together with the end."""
        self._end = MessageStopReason("end_turn", None)
        self._thinking_tokens = 0

    def delta(self, index: int, delta: Delta) -> None:
        """Send what a step added."""
        before = self._before
        if before is not None and not (delta.finish or delta.reasoning or delta.tool_calls):
            if delta.text:
                self._stream.text(before, delta.text, _AFTER)
            return
        frames = self._frames(delta)
        if delta.finish is not None:
            self._thinking_tokens = delta.reasoning_tokens
            self._end = message_stop(self._head, delta.finish, delta.stop_reason, called=self._call >= 0)
            self._last = frames + self._closing()
        elif frames:
            self._stream.send(frames)

    def lane(self, index: int, gaps: StreamGaps) -> Lane | None:
        """See Answer.lane."""
        if self._before is None or self._head.parsing is not None:
            return None
        return self._stream.lane(self._before, _AFTER, gaps)

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Send why it ended, the usage, and the end."""
        last = self._last + self._closing() if self._begun else self._opening(usage)
        shown = message_usage(usage, None if self._head.parsing is None else self._thinking_tokens)
        end = event_frame(MessageDelta(self._end, shown)) + event_frame(MessageStop())
        self._stream.end(last + end, timing)

    def fail(self, error: KvasirError) -> None:
        """Send the error as an event if the stream has begun, else as an error response."""
        self._stream.fail(self._last, error)

    def _frames(self, delta: Delta) -> bytes:
        frames = b""
        if not self._begun:
            cached = 0 if delta.usage is None else delta.usage.cached_tokens
            frames = self._opening(Usage(prompt_tokens=self._head.prompt_tokens, cached_tokens=cached))
        if delta.reasoning and not self._head.hides_reasoning:
            frames += self._prose(partial(self._thinking, delta.reasoning))
        if delta.text:
            frames += self._prose(partial(self._text, delta.text))
        for piece in wanted_calls(self._head, delta.tool_calls):
            frames += self._call_piece(piece)
        return frames

    def _opening(self, usage: Usage) -> bytes:
        self._begun = True
        head = self._head
        empty = MessageAnswer(head.id, "assistant", head.model, [], None, None, message_usage(usage))
        return event_frame(MessageStart(empty)) + event_frame(PingEvent())

    def _prose(self, write: Callable[[], bytes]) -> bytes:
        if self._call < 0:
            return write()
        self._late.append(write)
        return b""

    def _text(self, text: str) -> bytes:
        frames = self._enter(_Open.TEXT, TextOutput(""))
        self._before = _BEFORE % self._index
        return frames + self._piece(TextPiece(text))

    def _thinking(self, text: str) -> bytes:
        return self._enter(_Open.THINKING, ThinkingOutput("", "")) + self._piece(ThinkingPiece(text))

    def _call_piece(self, piece: ToolCallDelta) -> bytes:
        frames = b""
        if piece.index > self._call:
            self._call = piece.index
            frames = self._leave() + self._enter(_Open.CALL, ToolUseOutput(piece.call_id, piece.name, {}))
        elif piece.index < self._call or self._open is not _Open.CALL:
            raise AssertionError("a call goes on after its block has ended")
        return frames + self._piece(InputPiece(piece.arguments)) if piece.arguments else frames

    def _enter(self, kind: _Open, block: OutputBlock) -> bytes:
        """Open a block of this kind, unless one is open."""
        if self._open is kind:
            return b""
        frames = self._leave()
        self._open = kind
        self._index += 1
        return frames + event_frame(ContentBlockStart(self._index, block))

    def _leave(self) -> bytes:
        """End the open block, if any."""
        kind, self._open = self._open, _Open.NONE
        self._before = None
        if kind is _Open.NONE:
            return b""
        signed = self._piece(SignaturePiece(self._head.id)) if kind is _Open.THINKING else b""
        return signed + event_frame(ContentBlockStop(self._index))

    def _closing(self) -> bytes:
        """Write what waited, and end the last block."""
        late, self._late = self._late, []
        return b"".join(write() for write in late) + self._leave()

    def _piece(self, piece: BlockPiece) -> bytes:
        return event_frame(ContentBlockDelta(self._index, piece))
