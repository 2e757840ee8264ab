"""The simulated model's reasoning and tool calls, and their parser.

In a real engine these come from the model and vLLM's parsers. Here a request gets reasoning and calls on
demand, at fixed positions of the output, so that everything above an engine can be tested with them:
reasoning if the template variables have `enable_thinking`, one call if one is forced, two if several are
required, and one at every other prompt if the model may choose.

    <think> ba be bi bo</think> bu ...            or, with a call,
    <think> ba be bi bo</think><call> da de di</call>

Marks are the last tokens of the vocabulary. A call's arguments are the object {"words": " da de di"}.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Sequence

from kvasir.core.requests import OutputParsing, ToolCallDelta
from kvasir_workers.engines.parts import StepParts
from kvasir_workers.engines.sim.model import SimModel

_THINK, _THOUGHT, _CALL, _CALLED = "<think>", "</think>", "<call>", "</call>"
_MARKS = (_THINK, _THOUGHT, _CALL, _CALLED)
_REASONING_WORDS = 8
_ARGUMENT_WORDS = 6


class Speech:
    """Positions of tokens in the output of a request, and the text of marks."""

    def __init__(self, model: SimModel, parsing: OutputParsing, prompt: array[int], *, ends: bool) -> None:
        first = model.vocab_size - len(_MARKS)
        self.marks = {first + number: mark for number, mark in enumerate(_MARKS)}
        self._ids = {mark: token for token, mark in self.marks.items()}
        self._forced: dict[int, int] = {}
        self._at = 0
        if _thinks(parsing):
            self._between(_THINK, _REASONING_WORDS, _THOUGHT)
        calls = _calls(parsing, prompt)
        for _ in range(calls):
            self._between(_CALL, _ARGUMENT_WORDS, _CALLED)
        if calls and ends:
            self._forced[self._at] = model.eos_token_id

    def token(self, position: int) -> int | None:
        """Return the token at a position; None if it is free, except for marks."""
        return self._forced.get(position)

    def _between(self, begin: str, words: int, end: str) -> None:
        self._forced[self._at] = self._ids[begin]
        self._forced[self._at + words + 1] = self._ids[end]
        self._at += words + 2


class SpeechParser:
    """See kvasir_workers.engines.parts.PartsParser; of one choice."""

    def __init__(self, speech: Speech, parsing: OutputParsing) -> None:
        self._marks = speech.marks
        self._with_reasoning = parsing.reasoning
        self._functions = _functions(parsing)
        self._state = ""
        self._held = ""
        self._calls = 0
        self._thinking = False
        self._reasoning_tokens = 0

    def take(self, text: str, token_ids: Sequence[int], *, finished: bool) -> StepParts:
        """See PartsParser."""
        for token in token_ids:
            mark = self._marks.get(token)
            if mark is None:
                self._reasoning_tokens += self._thinking
            else:
                self._thinking = mark == _THINK
        said: list[tuple[str, str | None]] = []
        pending = self._held + text
        while (found := self._next_mark(pending)) is not None:
            at, mark = found
            said.append((self._state, pending[:at]))
            pending = pending[at + len(mark) :]
            self._state = mark if mark in (_THINK, _CALL) else ""
            said.append((mark, None))
        keep = 0 if finished else _beginning(pending)
        self._held = pending[len(pending) - keep :]
        said.append((self._state, pending[: len(pending) - keep]))
        return self._parts(said, len(text))

    def reasoning_tokens(self) -> int:
        """See PartsParser."""
        return self._reasoning_tokens

    def _next_mark(self, text: str) -> tuple[int, str] | None:
        found = [(at, mark) for mark in _MARKS if (at := text.find(mark)) >= 0]
        return min(found, default=None)

    def _parts(self, said: list[tuple[str, str | None]], taken: int) -> StepParts:
        """Return the parts of `said`: texts, each with the mark that precedes it, and marks, which have no
        text."""
        content = reasoning = ""
        calls: list[ToolCallDelta] = []
        for state, text in said:
            if text is None:
                if state == _CALL:
                    calls.append(self._header())
                elif state == _CALLED:
                    calls.append(ToolCallDelta(self._calls - 1, arguments='"}'))
            elif not text:
                continue
            elif state == _CALL:
                calls.append(ToolCallDelta(self._calls - 1, arguments=text))
            elif state == _THINK:
                reasoning += text if self._with_reasoning else ""
            else:
                content += text
        return StepParts(text=content, reasoning=reasoning, tool_calls=tuple(calls), taken=taken)

    def _header(self) -> ToolCallDelta:
        index, self._calls = self._calls, self._calls + 1
        name = self._functions[index % len(self._functions)]
        return ToolCallDelta(index, call_id=f"call_{index}", name=name, arguments='{"words": "')


def _thinks(parsing: OutputParsing) -> bool:
    return bool(parsing.template_kwargs and json.loads(parsing.template_kwargs).get("enable_thinking"))


def _calls(parsing: OutputParsing, prompt: array[int]) -> int:
    if not _functions(parsing) or parsing.tool_choice == "none":
        return 0
    if parsing.tool_choice == "auto":
        return zlib.crc32(prompt.tobytes()) & 1
    return 2 if parsing.tool_choice == "required" and parsing.parallel_tool_calls else 1


def _functions(parsing: OutputParsing) -> list[str]:
    if parsing.function:
        return [parsing.function]
    return [tool["function"]["name"] for tool in json.loads(parsing.tools)] if parsing.tools else []


def _beginning(text: str) -> int:
    """Return how many of the last characters may begin a mark."""
    longest = max(len(mark) for mark in _MARKS) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in _MARKS):
            return length
    return 0
