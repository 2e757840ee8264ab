"""A whole message: the deltas joined into one JSON object."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, ToolCallDelta, Usage
from kvasir.native import StreamGaps
from kvasir.ports.router import Lane
from kvasir_platform.gateway.anthropic.answers import (
    MessageAnswer,
    MessageStopReason,
    OutputBlock,
    TextOutput,
    ThinkingOutput,
    ToolUseOutput,
    message_stop,
    message_usage,
)
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.answer import AnswerHead, wanted_calls
from kvasir_platform.gateway.openai.conversation import called_with

_Kind: TypeAlias = type[TextOutput] | type[ThinkingOutput]
_Prose: TypeAlias = tuple[_Kind, list[str]]
"""A block of text or reasoning, in pieces."""


class WholeMessage:
    """One message, sent when it has ended. The output limit of the request bounds its memory. Its blocks are
    those of a stream: what comes after a call began is in blocks after the calls."""

    def __init__(self, exchange: Exchange, head: AnswerHead) -> None:
        self._exchange = exchange
        self._head = head
        self._blocks: list[_Prose] = []
        self._calls: dict[int, list[ToolCallDelta]] = {}
        self._late: list[_Prose] = []
        self._end = MessageStopReason("end_turn", None)
        self._thinking_tokens = 0

    def delta(self, index: int, delta: Delta) -> None:
        """Store what a step added."""
        if delta.reasoning and not self._head.hides_reasoning:
            self._add(ThinkingOutput, delta.reasoning)
        if delta.text:
            self._add(TextOutput, delta.text)
        for piece in wanted_calls(self._head, delta.tool_calls):
            self._calls.setdefault(piece.index, []).append(piece)
        if delta.finish is not None:
            self._thinking_tokens = delta.reasoning_tokens
            self._end = message_stop(self._head, delta.finish, delta.stop_reason, called=bool(self._calls))

    def lane(self, index: int, gaps: StreamGaps) -> Lane | None:
        """Return None: nothing has been sent yet."""
        return None

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Send the message."""
        head, end = self._head, self._end
        shown = message_usage(usage, None if head.parsing is None else self._thinking_tokens)
        answer = MessageAnswer(
            head.id, "assistant", head.model, self._content(), end.stop_reason, end.stop_sequence, shown
        )
        self._exchange.respond(200, msgspec.json.encode(answer), headers=timing)

    def fail(self, error: KvasirError) -> None:
        """Send the error instead."""
        self._exchange.fail(error)

    def _add(self, kind: _Kind, text: str) -> None:
        blocks = self._late if self._calls else self._blocks
        if not blocks or blocks[-1][0] is not kind:
            blocks.append((kind, []))
        blocks[-1][1].append(text)

    def _content(self) -> list[OutputBlock]:
        calls = [_called(self._calls[number]) for number in sorted(self._calls)]
        return [*map(self._block, self._blocks), *calls, *map(self._block, self._late)]

    def _block(self, prose: _Prose) -> OutputBlock:
        kind, texts = prose
        text = "".join(texts)
        return TextOutput(text) if kind is TextOutput else ThinkingOutput(text, self._head.id)


def _called(pieces: list[ToolCallDelta]) -> ToolUseOutput:
    first = pieces[0]
    return ToolUseOutput(first.call_id, first.name, called_with("".join(each.arguments for each in pieces)))
