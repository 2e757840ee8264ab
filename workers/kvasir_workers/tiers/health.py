"""Whether a tier is of use, in words for people, said once for each change; and what it has done, in numbers.

Disk and Redis fail in ways of their own and are judged alike: by a breaker, with the reason and the remedy in
one line of the log when it opens, and one line when it closes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvasir.core.kv import Medium, TierLoad
from kvasir.ports.clock import Rng
from kvasir_workers.tiers.breaker import Breaker, BreakerLimits

_log = logging.getLogger(__name__)


class TierHealth:
    """One thing that a tier depends on, such as that a server answers or that a disk takes writes."""

    def __init__(self, what: str, now: Callable[[], float], rng: Rng, limits: BreakerLimits | None) -> None:
        self._what = what
        self._now = now
        self._breaker = Breaker(rng, limits)
        self.trouble = ""
        """Why it is left alone, and what to do; "" while it is used."""

    @property
    def usable(self) -> bool:
        """Whether to use it."""
        return self._breaker.closed

    def due(self) -> bool:
        """Whether to try it, though it is in trouble; see Breaker.due."""
        return self._breaker.due(self._now())

    def failed(self, trouble: str, *, at_once: bool = False) -> None:
        """It failed; `trouble` says how, and what to do. See Breaker.failed for `at_once`."""
        opened = self._breaker.failed(self._now(), at_once=at_once)
        if not self._breaker.closed:
            self.trouble = trouble
        if opened:
            _log.warning("%s is not used for the time being: %s", self._what, trouble)

    def succeeded(self) -> None:
        """It did its work, or passed a trial."""
        if self._breaker.succeeded(self._now()):
            self.trouble = ""
            _log.warning("%s is used again", self._what)


class TierCounters:
    """What a tier with blocks of `block_bytes` bytes has done. `load` is made anew with every change: what
    other threads read agrees with itself."""

    def __init__(self, medium: Medium, block_bytes: int, capacity: int) -> None:
        self._block_bytes = block_bytes
        self.load = TierLoad(medium, bytes_capacity=capacity)

    def loaded(self, blocks: int, seconds: float) -> None:
        """One read of so many blocks."""
        self.add(loads=1, loaded_blocks=blocks, loaded_bytes=blocks * self._block_bytes, load_s=seconds)

    def stored(self, blocks: int) -> None:
        """So many blocks were written."""
        self.add(stored_blocks=blocks, stored_bytes=blocks * self._block_bytes)

    def add(self, **more: float) -> None:
        """To the counters of these names."""
        sums: dict[str, Any] = {name: getattr(self.load, name) + count for name, count in more.items()}
        self.load = replace(self.load, **sums)
