"""Whole answers: the deltas of all choices put together into one JSON object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, PositionLogprobs, Usage
from kvasir_platform.gateway.answer import (
    FINISH,
    AnswerHead,
    chat_logprobs,
    completion_logprobs,
    usage_object,
)
from kvasir_platform.gateway.errors import error_headers, error_status
from kvasir_platform.gateway.http import Exchange


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | None = None


class WholeAnswer:
    """One answer that is sent when its last choice has ended. What it holds is bounded by the output
    limit of the request."""

    def __init__(self, exchange: Exchange, head: AnswerHead, *, chat: bool) -> None:
        self._exchange = exchange
        self._head = head
        self._chat = chat
        self._choices = [_Choice() for _ in range(head.choices)]

    def delta(self, index: int, delta: Delta) -> None:
        """Keep what a step added to choice `index`."""
        choice = self._choices[index]
        if delta.text:
            choice.text.append(delta.text)
        if delta.logprobs:
            choice.logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            choice.finish = FINISH.get(delta.finish)
            choice.stop_reason = delta.stop_reason

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Send the answer."""
        head = self._head
        body = {
            "id": head.id,
            "object": "chat.completion" if self._chat else "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": [self._object(i, choice) for i, choice in enumerate(self._choices)],
            "usage": usage_object(usage),
        }
        self._exchange.respond(200, msgspec.json.encode(body), headers=timing)

    def fail(self, error: KvasirError) -> None:
        """Send the error instead."""
        self._exchange.fail(error_status(error), error, error_headers(error))

    def _object(self, index: int, choice: _Choice) -> dict[str, Any]:
        text, top = "".join(choice.text), self._head.logprobs
        made: dict[str, Any] = {"index": index}
        if self._chat:
            made["message"] = {"role": "assistant", "content": text, "refusal": None}
            made["logprobs"] = None if top is None else chat_logprobs(choice.logprobs, top)
        else:
            made["text"] = text
            made["logprobs"] = None if top is None else completion_logprobs(choice.logprobs, top, 0)
        made["finish_reason"] = choice.finish
        if choice.stop_reason is not None:
            made["stop_reason"] = choice.stop_reason
        return made
