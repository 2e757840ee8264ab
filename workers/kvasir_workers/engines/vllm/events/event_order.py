"""Restores the order of one publisher's messages, and requests lost ones.

vLLM numbers a rank's messages from 0 and keeps the latest for replay. Both can be lost: live messages when
the subscriber joins late or lags, replayed ones when too many arrive at once. This module does no I/O, so
that every order of arrival can be tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_MAX_TRIES = 5


class EventOrder:
    """Calls `take(payload)` once for each message, in order, and `ask(number)` to replay from a number on.

    Messages that cannot be replayed are reported to `lost` with the reason, and skipped. At most
    `max_waiting` live messages wait for a replay; those beyond are requested again.
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
        """Handle a published message."""
        if number == self._next:
            self._advance(payload)
        elif number > self._next and len(self._waiting) < self._max_waiting:
            self._waiting.append((number, payload))
            if not self._asking:
                self._begin()

    def answer(self, number: int, payload: bytes) -> None:
        """Handle a replayed message."""
        if not self._asking or number < self._next:
            return
        if number > self._next:
            if self._answered:
                # Lost in the replay: it is requested again when the replay ends.
                return
            self._skip_to(number)
        self._answered = True
        self._advance(payload)

    def answer_ended(self) -> None:
        """Handle the end of a replay."""
        if not self._asking:
            return
        self._asking = False
        if self._answered:
            self._tries = 0
        waiting, self._waiting = self._waiting, deque()
        for number, payload in waiting:
            self.live(number, payload)

    def unanswered(self) -> None:
        """Handle a replay that timed out."""
        if self._asking:
            self._begin()

    def probe(self) -> None:
        """Request messages after the last one: a lost message that is followed by none leaves no gap."""
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
            # It is not known whether there was any message.
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
