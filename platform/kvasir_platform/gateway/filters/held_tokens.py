"""Holds token ids and logprobs while filters judge their text.

They would reveal redacted text, so they are held until their text was ruled on, released together with it,
and dropped if it is redacted.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from kvasir.core.requests import Delta, PositionLogprobs
from kvasir_platform.gateway.filters.spans import Spans


@dataclass(slots=True)
class _Tokens:
    """The tokens of one step; their text is between `begin` and `lag` characters beyond `end`."""

    begin: int
    end: int
    ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]


class HeldTokens:
    """The held tokens of one choice. An engine's text may arrive `lag` characters later than its tokens. If
    that is infinite, text cannot be assigned to tokens, and they are held until the end of the choice."""

    def __init__(self, lag: float) -> None:
        self._lag = lag
        self._waiting: deque[_Tokens] = deque()
        self._redacted = Spans()

    def add(self, delta: Delta, begin: int, end: int) -> None:
        """Hold the tokens of `delta`, whose text is from `begin` to `end` of the choice."""
        if delta.token_ids or delta.logprobs:
            self._waiting.append(_Tokens(begin, end, delta.token_ids, delta.logprobs))

    def redact(self, begin: int, end: int) -> None:
        """Mark this range as redacted."""
        self._redacted.add(begin, end)

    def limit(self, decided: int) -> int:
        """Return how far text can be sent, given rulings up to `decided`: never without its tokens."""
        if self._lag == math.inf:
            return decided
        limit = 0
        for tokens in self._waiting:
            if tokens.end + self._lag > decided:
                return max(limit, tokens.begin)
            limit = tokens.end
        return decided

    def take(
        self, decided: int, cut: int | None, *, whole: bool
    ) -> tuple[tuple[int, ...], tuple[PositionLogprobs, ...]]:
        """Return the tokens whose text was ruled on, without those with redacted text or with text beyond
        `cut`. `whole`: no more text follows."""
        ids: list[int] = []
        logprobs: list[PositionLogprobs] = []
        while self._waiting:
            tokens = self._waiting[0]
            reach = tokens.end + self._lag
            if not whole and (reach > decided or (cut is not None and reach > cut)):
                break
            self._waiting.popleft()
            if not self._redacted.meet(tokens.begin, reach):
                ids.extend(tokens.ids)
                logprobs.extend(tokens.logprobs)
        return tuple(ids), tuple(logprobs)

    def forget(self, upto: int) -> None:
        """Drop the redacted ranges before `upto`, whose text was released."""
        self._redacted.forget(self._waiting[0].begin if self._waiting else upto)

    def clear(self) -> None:
        """Drop everything."""
        self._waiting.clear()
