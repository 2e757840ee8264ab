"""Reads streamed and whole answers of OpenAI's API. Pure.

A chunk counts as output if it has text, a reasoning text or a tool call; the first chunk of a chat, which
only names the role, and the last ones with the finish reason and the counts of tokens do not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvasir_platform.bench.client.endpoint import CallResult

_MOST_LINE = 4 << 20
_DETAIL = 300
_OUTPUT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


class BrokenAnswerError(Exception):
    """An answer is not what the API says. `kind` is the error's kind."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail[:_DETAIL]


class AnswerEvents:
    """The server-sent events of one answer. It writes what it finds into `result`."""

    def __init__(self, result: CallResult) -> None:
        self._result = result
        self._rest = b""
        self.ended = False

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that came at `now`. Raises BrokenAnswerError for an event that is an error, or none."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _MOST_LINE:
            raise BrokenAnswerError("stream_broken", f"a line of more than {_MOST_LINE} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.ended = True
            return
        try:
            event = json.loads(payload)
        except ValueError:
            raise BrokenAnswerError("stream_broken", f"no JSON: {_shown(payload)}") from None
        if not isinstance(event, dict):
            raise BrokenAnswerError("stream_broken", f"no object: {_shown(payload)}")
        if event.get("error"):
            raise BrokenAnswerError("stream_error", message_in(payload))
        if event.get("usage"):
            read_usage(event["usage"], self._result)
        if any(_has_output(choice) for choice in event.get("choices") or ()):
            self._result.chunks.append(now)


def read_usage(usage: Mapping[str, Any], result: CallResult) -> None:
    """Take the server's counts of tokens."""
    result.prompt_tokens = _count(usage.get("prompt_tokens"))
    result.output_tokens = _count(usage.get("completion_tokens"))
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        result.cached_tokens = _count(details.get("cached_tokens"))


def read_whole(body: bytes, result: CallResult) -> None:
    """Take an answer that is not streamed. Raises BrokenAnswerError if it is no object with data."""
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    if not isinstance(value, dict) or not (value.get("data") or value.get("choices")):
        raise BrokenAnswerError("bad_answer", _shown(body))
    if isinstance(value.get("usage"), dict):
        read_usage(value["usage"], result)


def message_in(body: bytes) -> str:
    """The message of an error's body, else its text."""
    try:
        value = json.loads(body)
    except ValueError:
        return _shown(body)
    if isinstance(value, dict):
        inner = value.get("error", value)
        value = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(value)[:_DETAIL]


def _has_output(choice: object) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(delta.get(name) for name in _OUTPUT_FIELDS)
    return bool(choice.get("text"))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _shown(body: bytes) -> str:
    return body[:_DETAIL].decode("utf-8", "replace").strip()
