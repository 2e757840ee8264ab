"""Whether a tier is of use, in words for people, said once for each change; and what it has done, in numbers.

Disk and Redis fail in ways of their own and are judged alike: by a breaker, with the reason and the remedy in
one line of the log when it opens, and one line when it closes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvasir.core.kv import Medium, TierLoad
from kvasir.ports.clock import Rng
from kvasir_workers.tiers.breaker import Breaker, BreakerLimits


class Standing:
    """One thing that a tier depends on, such as that a server answers or that a disk takes writes."""

    def __init__(
        self, what: str, log: logging.Logger, now: Callable[[], float], rng: Rng, limits: BreakerLimits | None
    ) -> None:
        self._what = what
        self._log = log
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
            self._log.warning("%s is not used for the time being: %s", self._what, trouble)

    def succeeded(self) -> None:
        """It did its work, or passed a trial."""
        if self._breaker.succeeded(self._now()):
            self.trouble = ""
            self._log.warning("%s is used again", self._what)


@dataclass(slots=True)
class Tally:
    """A tier's counters, for TierLoad. `refused` counts the `corrupt_blocks`, which were not believed, by the
    word of `blob.verify`; each word is logged when it is first met."""

    what: str
    log: logging.Logger
    loads: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    stored_blocks: int = 0
    stored_bytes: int = 0
    evicted_blocks: int = 0
    corrupt_blocks: int = 0
    dropped_blocks: int = 0
    failures: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def loaded(self, blocks: int, size: int, seconds: float) -> None:
        """One read of `blocks` blocks, `size` bytes together."""
        self.loads += 1
        self.loaded_blocks += blocks
        self.loaded_bytes += size
        self.load_s += seconds

    def stored(self, blocks: int, size: int) -> None:
        """Blocks that were written, `size` bytes together."""
        self.stored_blocks += blocks
        self.stored_bytes += size

    def refuse(self, reason: str, where: str) -> None:
        """A blob at `where` was not believed, and is deleted there."""
        self.corrupt_blocks += 1
        self.refused[reason] += 1
        if self.refused[reason] == 1:
            self.log.warning(
                "%s: deleted %s, which is not the block it should be (%s); its prompt is computed again. "
                "Further ones are only counted: many of them mean a failing medium or a foreign writer",
                self.what,
                where,
                reason,
            )

    def load(
        self, medium: Medium, blocks: int, used: int, capacity: int, *, reads: Standing, writes: Standing
    ) -> TierLoad:
        """All of it, beside the tier's levels, and what it can do. From any thread."""
        return TierLoad(
            medium,
            blocks,
            used,
            capacity,
            self.loads,
            self.loaded_blocks,
            self.loaded_bytes,
            self.load_s,
            self.stored_blocks,
            self.stored_bytes,
            self.evicted_blocks,
            self.corrupt_blocks,
            self.dropped_blocks,
            self.failures,
            reads.trouble or writes.trouble,
            reads.usable,
        )
