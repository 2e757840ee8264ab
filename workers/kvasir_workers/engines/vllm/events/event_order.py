"""The messages of one publisher in the order of their numbers, whatever became of some on their way.

vLLM numbers what a rank publishes from 0 and keeps the newest messages for those who ask again. Both can be
lost: live ones when the subscriber joins late or lags, answers when too many come at once. There is no I/O
here, so that every order of arrival can be tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_MAX_TRIES = 5


class EventOrder:
    """Calls `take(payload)` once for each message, in order, and `ask(number)` for those from a number on.

    What can be had no more is reported to `lost` with the reason, and skipped. At most `max_waiting` live
    messages wait for answers; those beyond are asked for again.
    """

    def __init__(
        self,
        *,
        take: Callable[[bytes], None],
        ask: Callable[[int], None],
        lost: Callable[[str], None],
        max_waiting: int,
    ) -> None:
        self._take = take
        self._ask = ask
        self._lost = lost
        self._max_waiting = max_waiting
        self._next = 0
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._asking = False
        self._answered = False
        self._tries = 0

    def live(self, number: int, payload: bytes) -> None:
        """A message has been published."""
        if number == self._next:
            self._advance(payload)
        elif number > self._next and len(self._waiting) < self._max_waiting:
            self._waiting.append((number, payload))
            if not self._asking:
                self._begin()

    def answer(self, number: int, payload: bytes) -> None:
        """A message that was asked for."""
        if not self._asking or number < self._next:
            return
        if number > self._next:
            if self._answered:
                # Dropped on its way: it is asked for again when the answer ends.
                return
            self._skip_to(number)
        self._answered = True
        self._advance(payload)

    def answer_ended(self) -> None:
        """All that was asked for, and could be had, has come."""
        if not self._asking:
            return
        self._asking = False
        if self._answered:
            self._tries = 0
        waiting, self._waiting = self._waiting, deque()
        for number, payload in waiting:
            self.live(number, payload)

    def unanswered(self) -> None:
        """The answer has not come in time."""
        if self._asking:
            self._begin()

    def probe(self) -> None:
        """Ask whether there is anything newer: a message that was lost and followed by none shows no gap."""
        if not self._asking:
            self._begin()

    def _begin(self) -> None:
        self._tries += 1
        if self._tries > _MAX_TRIES:
            self._tries = 0
            self._asking = False
            self._give_up()
            return
        self._asking, self._answered = True, False
        self._ask(self._next)

    def _give_up(self) -> None:
        if not self._waiting:
            # Nothing says that there was anything to have.
            return
        self._skip_to(self._waiting[0][0])
        waiting, self._waiting = self._waiting, deque()
        for number, payload in waiting:
            self.live(number, payload)

    def _skip_to(self, number: int) -> None:
        self._lost(f"vLLM's KV events {self._next} to {number - 1} are lost")
        self._next = number

    def _advance(self, payload: bytes) -> None:
        self._next += 1
        self._take(payload)
