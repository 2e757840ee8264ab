"""The health record of each worker, and the counts of its pool that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

LATENESS_WEIGHT = 0.3
"""Weight of the newest request in a worker's slowness."""
FEWEST_SAMPLES = 3
"""Number of requests below which a worker's slowness is not used."""
_MOST = math.log(1000.0)
MOST_CREDIT = 2.0
"""Most requests that a rationed worker may start at once after it was passed over."""


class HealthLevel(StrEnum):
    """How much work a worker gets, from least to most."""

    SILENT = "unresponsive"
    EJECTED = "ejected"
    PROBING = "probing"
    SLOW_START = "slow_start"
    HEALTHY = "healthy"


BAD = (HealthLevel.SILENT, HealthLevel.EJECTED)
RATIONED = (HealthLevel.SLOW_START, HealthLevel.EJECTED)
"""Levels that start a part of what healthy workers start."""


@dataclass(frozen=True, slots=True)
class Ramp:
    """A share that grows linearly from `share` at `since_s` to 1 at `until_s`. `why` is shown to
    operators."""

    share: float
    since_s: float
    until_s: float
    why: str

    def at(self, now: float) -> float:
        """The share at a time."""
        passed = (now - self.since_s) / (self.until_s - self.since_s)
        return self.share + (1.0 - self.share) * min(1.0, max(0.0, passed))


@dataclass(slots=True)
class Slowness:
    """Times to first token over the predicted ones, as a weighted geometric mean: ratios multiply, and one
    request that took a thousand times longer must not outweigh all others."""

    log: float = 0.0
    samples: int = 0

    def observe(self, ratio: float) -> None:
        """Add one request's ratio."""
        value = min(_MOST, max(-_MOST, math.log(max(ratio, 1e-9))))
        weight = max(LATENESS_WEIGHT, 1.0 / (self.samples + 1))
        self.log += weight * (value - self.log)
        self.samples += 1

    @property
    def ratio(self) -> float:
        """The mean; meaningless without samples."""
        return math.exp(self.log)


@dataclass(slots=True, eq=False)
class WorkerHealth:
    """One worker. `failures` are consecutive. `growth` is the number of doublings of the next ejection; part
    of it decays with the time since `good_since_s`. `out_until_s` is set while the worker is ejected, `brief`
    if that is only a pause. `old_legs` is an upper bound of the legs that began before the probe. `credit` is
    the number of requests that it may start while it is rationed. `level` follows from the rest, see
    `derived`."""

    worker_id: str
    pool: Pool
    joined_s: float
    good_since_s: float
    legs: int = 0
    old_legs: int = 0
    level: HealthLevel = HealthLevel.HEALTHY
    why: str = ""
    failures: int = 0
    growth: int = 0
    ejections: int = 0
    out_until_s: float | None = None
    brief: bool = False
    probing: bool = False
    silent_since_s: float | None = None
    ramp: Ramp | None = None
    credit: float = 1.0
    slowness: Slowness = field(default_factory=Slowness)

    @property
    def derived(self) -> HealthLevel:
        """The level that follows from the record."""
        if self.silent_since_s is not None:
            return HealthLevel.SILENT
        if self.out_until_s is not None:
            return HealthLevel.EJECTED
        if self.probing:
            return HealthLevel.PROBING
        return HealthLevel.HEALTHY if self.ramp is None else HealthLevel.SLOW_START

    @property
    def next_due(self) -> float:
        """When time alone changes something; infinite if it never does."""
        out = math.inf if self.out_until_s is None else self.out_until_s
        return out if self.ramp is None else min(out, self.ramp.until_s)

    def share(self, now: float) -> float:
        """The fraction of its peers' load that its ramp allows."""
        return 1.0 if self.ramp is None else self.ramp.at(now)

    def has_enough(self, now: float) -> bool:
        """Whether it has all the requests that probing or a slow start allow. The limit on legs does
        not bound short requests, few of which run at once; the limit on starts does not bound long ones."""
        if self.level is HealthLevel.PROBING:
            return self.legs > self.old_legs
        if self.level is HealthLevel.EJECTED:
            # In a pool used as a whole, a worker that fails at once looks idle and would attract everything.
            return self.credit < 1.0 and self.pool.counts[HealthLevel.HEALTHY] > 0
        at_once = max(1, int(self.share(now) * (1.0 + self.pool.mean_legs)))
        return self.legs >= at_once or self.credit < 1.0

    def spend(self, started: int) -> None:
        """Count requests that were started on it."""
        self.credit = max(0.0, self.credit - started)

    def earn(self, started: float, now: float) -> None:
        """Count the average number of requests started on each healthy peer."""
        self.credit = min(MOST_CREDIT, self.credit + self.share(now) * started)


@dataclass(slots=True, eq=False)
class Pool:
    """Workers that can replace each other. `counts` are by level; `healthy_legs` is the sum over healthy
    ones."""

    name: str
    members: dict[str, WorkerHealth] = field(default_factory=dict)
    counts: dict[HealthLevel, int] = field(default_factory=lambda: dict.fromkeys(HealthLevel, 0))
    healthy_legs: int = 0

    @property
    def mean_legs(self) -> float:
        """Average legs of a healthy worker."""
        return self.healthy_legs / max(1, self.counts[HealthLevel.HEALTHY])

    def crowded(self, full: Set[str]) -> int:
        """The number of healthy workers among those in `full`."""
        members = (self.members.get(worker_id) for worker_id in full)
        return sum(each is not None and each.level is HealthLevel.HEALTHY for each in members)

    def panics(self, most: float) -> bool:
        """Whether more than this fraction of the pool looks bad."""
        return sum(self.counts[each] for each in BAD) > most * len(self.members)

    def seasoned(self, since: float) -> bool:
        """Whether some healthy worker joined before `since_s`."""
        return any(
            member.level is HealthLevel.HEALTHY and member.joined_s <= since
            for member in self.members.values()
        )

    def slow_starters(self) -> Iterable[WorkerHealth]:
        """The members whose share grows."""
        return [member for member in self.members.values() if member.level is HealthLevel.SLOW_START]

    def slowness_of_peers(self, member: WorkerHealth) -> float | None:
        """The median slowness of the others that have enough samples."""
        peers = [peer.slowness.log for peer in self.members.values() if peer.slowness.samples]
        if member.slowness.samples:
            peers.remove(member.slowness.log)
        return math.exp(median(peers)) if peers else None

    def enter(self, member: WorkerHealth) -> None:
        """Count a member at its level."""
        member.level = member.derived
        self.counts[member.level] += 1
        if member.level is HealthLevel.HEALTHY:
            self.healthy_legs += member.legs

    def quit(self, member: WorkerHealth) -> None:
        """Remove a member from the counts."""
        self.counts[member.level] -= 1
        if member.level is HealthLevel.HEALTHY:
            self.healthy_legs -= member.legs
