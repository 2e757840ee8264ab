"""Holds pieces of text while a client lags, and sends them as one, to reduce its backlog."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

_MAX_CHARS = 16 << 10
_PIECE_CHARS = 16
"""Overhead of one held piece, in characters."""


@dataclass(slots=True)
class _Held:
    part: object
    send: Callable[[str], None]
    texts: list[str] = field(default_factory=list)


class LaggingText:
    """The held pieces of one stream, joined for each of its choices. The connection limits what is queued
    there when they are sent."""

    __slots__ = ("_chars", "_held")

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._chars = 0

    def hold(self, index: int, part: object, text: str, send: Callable[[str], None]) -> None:
        """Hold a piece of choice `index`. `part` tells pieces apart that are not joined, such as content and
        reasoning; `send` sends the joined text of one. Beyond a limit, everything is sent."""
        held = self._held.get(index)
        if held is not None and held.part != part:
            self.let_go()
            held = None
        if held is None:
            held = self._held[index] = _Held(part, send)
        held.texts.append(text)
        self._chars += len(text) + _PIECE_CHARS
        if self._chars > _MAX_CHARS:
            self.let_go()

    def let_go(self) -> None:
        """Send what is held."""
        if not self._held:
            return
        held, self._held = self._held, {}
        self._chars = 0
        for each in held.values():
            each.send("".join(each.texts))
