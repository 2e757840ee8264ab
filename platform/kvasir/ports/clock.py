"""Time and randomness as ports, so that tests can run under virtual time."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Monotonic time in seconds. Readings compare only with readings of the same clock."""

    def now(self) -> float:
        """Seconds since an arbitrary point; never goes backwards."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return no earlier than after `seconds`; yield once if `seconds` is zero or less."""
        ...


class Rng(Protocol):
    """Seeded randomness. `random.Random` satisfies it."""

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...

    def randrange(self, stop: int, /) -> int:
        """Uniform integer in [0, stop). Raises ValueError if stop < 1."""
        ...

    def getrandbits(self, k: int, /) -> int:
        """Uniform integer of `k` bits."""
        ...
