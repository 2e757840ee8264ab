"""The health of a tier: whether it is used, as log messages for operators and as counters.

Disk and Redis fail in different ways but are handled alike: by a breaker, with the reason and the remedy in
one log line when it opens, and one line when it closes.
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
    """One capability that a tier depends on, such as answers of a server or writes to a disk."""

    def __init__(self, what: str, now: Callable[[], float], rng: Rng, limits: BreakerLimits | None) -> None:
        self._what = what
        self._now = now
        self._breaker = Breaker(rng, limits)
        self.trouble = ""
        """Why it is not used, and the remedy; "" while it is used."""

    @property
    def usable(self) -> bool:
        """Whether it is used."""
        return self._breaker.closed

    def due(self) -> bool:
        """Return whether a trial is due; see Breaker.due."""
        return self._breaker.due(self._now())

    def failed(self, trouble: str, *, at_once: bool = False) -> None:
        """Record a failure; `trouble` is the reason and the remedy. See Breaker.failed for `at_once`."""
        opened = self._breaker.failed(self._now(), at_once=at_once)
        if not self._breaker.closed:
            self.trouble = trouble
        if opened:
            _log.warning("%s is not used for the time being: %s", self._what, trouble)

    def succeeded(self) -> None:
        """Record a successful call or trial."""
        if self._breaker.succeeded(self._now()):
            self.trouble = ""
            _log.warning("%s is used again", self._what)


class TierCounters:
    """Counters of a tier with blocks of `block_bytes` bytes. `load` is replaced with every change, so that
    other threads read a consistent value."""

    def __init__(self, medium: Medium, block_bytes: int, capacity: int) -> None:
        self._block_bytes = block_bytes
        self.load = TierLoad(medium, bytes_capacity=capacity)

    def loaded(self, blocks: int, seconds: float) -> None:
        """Count one read of `blocks` blocks."""
        self.add(loads=1, loaded_blocks=blocks, loaded_bytes=blocks * self._block_bytes, load_s=seconds)

    def stored(self, blocks: int) -> None:
        """Count `blocks` written blocks."""
        self.add(stored_blocks=blocks, stored_bytes=blocks * self._block_bytes)

    def add(self, **more: float) -> None:
        """Add to the counters of these names."""
        sums: dict[str, Any] = {name: getattr(self.load, name) + count for name, count in more.items()}
        self.load = replace(self.load, **sums)
