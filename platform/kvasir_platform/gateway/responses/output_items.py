"""The output of a response: deltas become items, and the events that tell of them in order.

    item.added ─▶ part.added ─▶ delta … ─▶ text.done ─▶ part.done ─▶ item.done

Reasoning and text close when something else begins. Calls stay open until the end: parsers may add to an
earlier call after a later one has begun. Whole and streamed responses are made by the same code, so that they
cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvasir.core.requests import Delta, FinishReason, PositionLogprobs, ToolCallDelta
from kvasir_platform.gateway.openai.answer import AnswerHead, chat_logprobs, wanted_calls

Event = dict[str, Any]
"""One event, without its number."""

TEXT_DELTAS = frozenset(
    (
        "response.output_text.delta",
        "response.reasoning_text.delta",
        "response.function_call_arguments.delta",
    )
)
_TEXT, _REASONING = "output_text", "reasoning_text"


@dataclass(slots=True)
class _Item:
    """An item that is open. `kind` is that of its part: output_text, reasoning_text, or "" for a call."""

    index: int
    id: str
    kind: str
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    call_id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self, text: str, logprobs: list[Any]) -> dict[str, Any]:
        if self.kind == _REASONING:
            return {"type": _REASONING, "text": text}
        return {"type": _TEXT, "text": text, "annotations": [], "logprobs": logprobs}

    def shown(self, status: str) -> dict[str, Any]:
        """Return the item as clients see it."""
        if self.kind == "":
            return {
                "type": "function_call",
                "id": self.id,
                "call_id": self.call_id,
                "name": self.name,
                "arguments": self.text,
                "status": status,
            }
        parts = [self.part(self.text, self.logprobs)] if status != "in_progress" else []
        if self.kind == _REASONING:
            return {"type": "reasoning", "id": self.id, "summary": [], "content": parts, "status": status}
        return {"type": "message", "id": self.id, "role": "assistant", "content": parts, "status": status}


class OutputItems:
    """The items of one response, from the deltas of its only choice. `key` makes ids unique; `head` says what
    is shown."""

    def __init__(self, key: str, head: AnswerHead) -> None:
        self._key = key
        self._head = head
        self._done: dict[int, dict[str, Any]] = {}
        self._count = 0
        self._open: _Item | None = None
        """Reasoning or text that is being added to."""
        self._calls: dict[int, _Item] = {}
        self._blank = ""
        self._blank_logprobs: list[Any] = []
        """White space that is an item only if text follows: models put it between reasoning and calls."""
        self.finish: FinishReason | None = None
        self.reasoning_tokens = 0

    def add(self, delta: Delta) -> list[Event]:
        """Return the events of what a step added."""
        events: list[Event] = []
        if delta.reasoning and not self._head.hides_reasoning:
            self._add_text(_REASONING, delta.reasoning, [], events)
        if delta.text:
            self._add_content(delta.text, delta.logprobs, events)
        for piece in wanted_calls(self._head, delta.tool_calls):
            self._add_call(piece, events)
        if delta.finish is not None:
            self.finish = delta.finish
            self.reasoning_tokens = delta.reasoning_tokens
        return events

    def end(self) -> list[Event]:
        """Close all items, of which the last is incomplete unless the model ended it. Return the events."""
        cut = self.finish is not FinishReason.STOP
        events: list[Event] = []
        if self._blank and not self._count:
            self._add_text(_TEXT, self._take_blank(), self._blank_logprobs, events)
        open_items = sorted(
            (*self._calls.values(), *(() if self._open is None else (self._open,))),
            key=lambda item: item.index,
        )
        self._calls, self._open = {}, None
        for item in open_items:
            last = item.index == self._count - 1
            self._close(item, "incomplete" if cut and last else "completed", events)
        return events

    @property
    def items(self) -> list[dict[str, Any]]:
        """All items that are closed, in order."""
        return [self._done[index] for index in sorted(self._done)]

    def _take_blank(self) -> str:
        blank, self._blank = self._blank, ""
        return blank

    def _add_content(self, text: str, positions: Sequence[PositionLogprobs], events: list[Event]) -> None:
        shown = chat_logprobs(positions, self._head)
        logprobs = [] if shown is None else shown["content"]
        if self._open is None or self._open.kind != _TEXT:
            if not text.strip():
                self._blank += text
                self._blank_logprobs += logprobs
                return
            text = self._take_blank() + text
            logprobs = [*self._blank_logprobs, *logprobs]
            self._blank_logprobs = []
        self._add_text(_TEXT, text, logprobs, events)

    def _add_text(self, kind: str, text: str, logprobs: list[Any], events: list[Event]) -> None:
        item = self._open
        if item is None or item.kind != kind:
            self._close_open(events)
            item = self._open = self._begin(kind, events)
            events.append(
                {
                    "type": "response.content_part.added",
                    "item_id": item.id,
                    "output_index": item.index,
                    "content_index": 0,
                    "part": item.part("", []),
                }
            )
        item.pieces.append(text)
        event = {
            "type": f"response.{kind}.delta",
            "item_id": item.id,
            "output_index": item.index,
            "content_index": 0,
            "delta": text,
        }
        if kind == _TEXT:
            item.logprobs += logprobs
            event["logprobs"] = logprobs
        events.append(event)

    def _add_call(self, piece: ToolCallDelta, events: list[Event]) -> None:
        item = self._calls.get(piece.index)
        if item is None:
            self._close_open(events)
            item = _Item(self._count, f"fc_{self._key}{self._count:02x}", "")
            item.call_id = piece.call_id or f"call_{self._key}{self._count:02x}"
            item.name = piece.name
            self._calls[piece.index] = item
            self._added(item, events)
        if piece.arguments:
            item.pieces.append(piece.arguments)
            events.append(
                {
                    "type": "response.function_call_arguments.delta",
                    "item_id": item.id,
                    "output_index": item.index,
                    "delta": piece.arguments,
                }
            )

    def _begin(self, kind: str, events: list[Event]) -> _Item:
        prefix = "rs" if kind == _REASONING else "msg"
        item = _Item(self._count, f"{prefix}_{self._key}{self._count:02x}", kind)
        self._added(item, events)
        return item

    def _added(self, item: _Item, events: list[Event]) -> None:
        self._count += 1
        events.append(
            {
                "type": "response.output_item.added",
                "output_index": item.index,
                "item": item.shown("in_progress"),
            }
        )

    def _close_open(self, events: list[Event]) -> None:
        if self._open is not None:
            self._close(self._open, "completed", events)
            self._open = None

    def _close(self, item: _Item, status: str, events: list[Event]) -> None:
        at = {"item_id": item.id, "output_index": item.index}
        text = item.text
        if item.kind:
            done = {"type": f"response.{item.kind}.done", **at, "content_index": 0, "text": text}
            if item.kind == _TEXT:
                done["logprobs"] = item.logprobs
            part = item.part(text, item.logprobs)
            events.append(done)
            events.append({"type": "response.content_part.done", **at, "content_index": 0, "part": part})
        else:
            events.append(
                {
                    "type": "response.function_call_arguments.done",
                    **at,
                    "name": item.name,
                    "arguments": text,
                }
            )
        shown = self._done[item.index] = item.shown(status)
        events.append({"type": "response.output_item.done", "output_index": item.index, "item": shown})
