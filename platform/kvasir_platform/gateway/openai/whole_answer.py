"""Whole answers: the deltas of all choices joined into one JSON object."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, FinishReason, PositionLogprobs, ToolCallDelta, Usage
from kvasir.native import StreamGaps
from kvasir.ports.router import Lane
from kvasir_platform.gateway.http.exchange import Exchange
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


@dataclass(slots=True)
class _Call:
    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def add(self, piece: ToolCallDelta) -> None:
        self.call_id = self.call_id or piece.call_id
        self.name = self.name or piece.name
        self.arguments.append(piece.arguments)

    def function(self) -> dict[str, str]:
        return {"name": self.name, "arguments": "".join(self.arguments)}


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    reasoning_tokens: int = 0
    finish: FinishReason | None = None
    stop_reason: str | None = None


class WholeAnswer:
    """One answer, sent when its last choice has ended. The output limit of the request bounds its memory."""

    def __init__(self, exchange: Exchange, head: AnswerHead, *, chat: bool) -> None:
        self._exchange = exchange
        self._head = head
        self._chat = chat
        self._choices = [_Choice() for _ in range(head.choices)]
        self._prompts: list[Positions] = [()] * len(head.prompts)

    def delta(self, index: int, delta: Delta) -> None:
        """Store what a step added to choice `index`."""
        choice, head = self._choices[index], self._head
        if head.prompt_only:
            delta = without_output(delta)
        if delta.text:
            choice.text.append(delta.text)
        if delta.logprobs:
            choice.logprobs.extend(delta.logprobs)
        if delta.reasoning:
            choice.reasoning.append(delta.reasoning)
        for piece in wanted_calls(head, delta.tool_calls):
            choice.calls.setdefault(piece.index, _Call()).add(piece)
        if head.return_token_ids:
            choice.token_ids.extend(delta.token_ids)
        if delta.prompt_logprobs and self._prompts:
            self._prompts[head.prompt_of(index)] = delta.prompt_logprobs
        if delta.finish is not None:
            choice.finish = delta.finish
            choice.stop_reason = delta.stop_reason
            choice.reasoning_tokens = delta.reasoning_tokens

    def lane(self, index: int, gaps: StreamGaps) -> Lane | None:
        """Return None: nothing has been sent yet."""
        return None

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Send the answer."""
        head = self._head
        if head.prompt_only:
            usage = replace(usage, output_tokens=0)
        reasoning_tokens = sum(choice.reasoning_tokens for choice in self._choices)
        body = {
            "id": head.id,
            "object": "chat.completion" if self._chat else "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": [self._object(i, choice) for i, choice in enumerate(self._choices)],
            "usage": usage_object(usage, None if head.parsing is None else reasoning_tokens),
        }
        if self._chat:
            self._add_prompt(body, 0)
        self._exchange.respond(200, msgspec.json.encode(body), headers=timing)

    def fail(self, error: KvasirError) -> None:
        """Send the error instead."""
        self._exchange.fail(error)

    def _object(self, index: int, choice: _Choice) -> dict[str, Any]:
        head = self._head
        made: dict[str, Any] = {"index": index}
        calls = [choice.calls[i] for i in sorted(choice.calls)]
        if self._chat:
            made["message"] = self._message(choice, calls)
            made["logprobs"] = chat_logprobs(choice.logprobs, head)
        else:
            made["text"], made["logprobs"] = self._completion(index, choice)
            self._add_prompt(made, index)
        made["finish_reason"] = finish_reason(head, choice.finish, bool(calls))
        if choice.stop_reason is not None:
            made["stop_reason"] = stop_reason(head, choice.stop_reason)
        if head.shows_token_ids:
            made["token_ids"] = choice.token_ids
        return made

    def _message(self, choice: _Choice, calls: list[_Call]) -> dict[str, Any]:
        head = self._head
        # With a parsed output, missing content differs from empty content.
        content = "".join(choice.text) if choice.text or head.parsing is None else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning and not head.hides_reasoning:
            message["reasoning"] = message["reasoning_content"] = "".join(choice.reasoning)
        if calls and head.legacy_functions:
            message["function_call"] = calls[0].function()
        elif calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": call.function()} for call in calls
            ]
        return message

    def _completion(self, index: int, choice: _Choice) -> tuple[str, dict[str, Any] | None]:
        head, text = self._head, "".join(choice.text)
        positions: Positions = choice.logprobs
        offset = 0
        if head.echo:
            prompt = head.prompt_of(index)
            text = head.prompts[prompt].text + text
            positions = (*self._prompts[prompt], *positions)
            offset = 0 if self._prompts[prompt] else len(head.prompts[prompt].text)
        return text, completion_logprobs(positions, head, index, offset)[0]

    def _add_prompt(self, shown: dict[str, Any], index: int) -> None:
        """Return what the answer shows of the prompt of choice `index`."""
        head = self._head
        if head.prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_logprobs(self._prompts[head.prompt_of(index)], head)
        if head.return_token_ids:
            shown["prompt_token_ids"] = prompt_ids(head, index)
