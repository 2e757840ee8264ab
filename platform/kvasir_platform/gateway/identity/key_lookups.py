"""Decides what to do about a token whose signing key is not known: read the keys again, wait, or refuse.

A provider rotates its keys, so that an unknown key id may be a new key; but anybody can send made-up ids.
Keys are therefore read at most once in `MIN_PAUSE_S`, an id that was not among them is refused for
`UNKNOWN_S` without reading, and both are bounded. Everything here is pure.
"""

from __future__ import annotations

from enum import Enum

from kvasir_platform.gateway.identity.json_web_tokens import KeyName

MIN_PAUSE_S = 10.0
UNKNOWN_S = 60.0
MAX_UNKNOWN = 1024
_MAX_PAUSE_S = 60.0


class KeyLookup(Enum):
    """What to do about an unknown key: wait for the keys, which are to be read; refuse the token; or answer
    that the client should come back."""

    WAIT = "wait"
    REFUSE = "refuse"
    LATER = "later"


class KeyLookups:
    """The reads of one provider's keys. Times are monotonic seconds."""

    def __init__(self, refresh_s: float) -> None:
        self._refresh_s = refresh_s
        self._unknown: dict[KeyName, float] = {}
        self._failures = 0
        self._reading = False
        self._next_s = 0.0
        """When keys may be read because of an unknown one."""
        self._due_s = 0.0

    @property
    def due_s(self) -> float:
        """When the keys are to be read next, whether or not a token asks for it."""
        return self._due_s

    def unknown(self, key: KeyName, now: float) -> KeyLookup:
        """Decide about a token with a key that is not among those that were read last."""
        if self._unknown.get(key, now) > now:
            return KeyLookup.REFUSE
        if self._reading or now >= self._next_s:
            return KeyLookup.WAIT
        return KeyLookup.LATER

    def retry_after_s(self, now: float) -> float:
        """Return when a token with an unknown key may be sent again."""
        return max(0.1, self._next_s - now)

    def reading(self, now: float) -> None:
        """The keys are being read."""
        self._reading = True
        self._next_s = now + MIN_PAUSE_S

    def read(self, missing: list[KeyName], now: float) -> None:
        """The keys were read, and `missing` were not among them."""
        self._reading, self._failures = False, 0
        self._due_s = now + self._refresh_s
        self._unknown = {key: until for key, until in self._unknown.items() if until > now}
        for key in missing:
            if len(self._unknown) < MAX_UNKNOWN:
                self._unknown[key] = now + UNKNOWN_S

    def failed(self, now: float) -> None:
        """The keys could not be read."""
        self._reading = False
        self._failures += 1
        pause_s = min(_MAX_PAUSE_S, self._refresh_s, 2.0 ** min(self._failures - 1, 10))
        self._due_s = now + pause_s
        self._next_s = min(self._next_s, self._due_s)
