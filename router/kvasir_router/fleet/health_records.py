"""How one worker stands among those of its pool: what health keeps of each, and the counts that follow."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

LATENESS_WEIGHT = 0.3
"""What the newest request counts in a worker's slowness."""
FEWEST_SAMPLES = 3
"""Requests without which a worker's slowness says nothing."""
_MOST = math.log(1000.0)
MOST_CREDIT = 2.0
"""A rationed worker that was passed over may begin so many requests at once, and no more."""


class HealthLevel(StrEnum):
    """What a worker is given, from the least to all."""

    SILENT = "unresponsive"
    EJECTED = "ejected"
    PROBING = "probing"
    SLOW_START = "slow_start"
    HEALTHY = "healthy"


BAD = (HealthLevel.SILENT, HealthLevel.EJECTED)
RATIONED = (HealthLevel.SLOW_START, HealthLevel.EJECTED)
"""Who may begin a part of what those begin that stand well."""


@dataclass(frozen=True, slots=True)
class Ramp:
    """A share that grows evenly from `share` at `since_s` to 1 at `until_s`. `why` is shown."""

    share: float
    since_s: float
    until_s: float
    why: str

    def at(self, now: float) -> float:
        """The share now."""
        passed = (now - self.since_s) / (self.until_s - self.since_s)
        return self.share + (1.0 - self.share) * min(1.0, max(0.0, passed))


@dataclass(slots=True)
class Slowness:
    """How many times longer than foreseen a worker's first tokens take, as a weighted geometric mean: ratios
    multiply, and one request that took a thousand times longer must not outweigh all others."""

    log: float = 0.0
    samples: int = 0

    def observe(self, ratio: float) -> None:
        """One request took so many times what was foreseen."""
        value = min(_MOST, max(-_MOST, math.log(max(ratio, 1e-9))))
        weight = max(LATENESS_WEIGHT, 1.0 / (self.samples + 1))
        self.log += weight * (value - self.log)
        self.samples += 1

    @property
    def ratio(self) -> float:
        """The mean; meaningless while there are no samples."""
        return math.exp(self.log)


@dataclass(slots=True, eq=False)
class WorkerHealth:
    """One worker. `failures` are those in a row. `growth` is by how many doublings the next ejection is
    longer; a part of it is forgiven for the time since `good_since_s`. `out_until_s` is set while it is
    ejected, `brief` where that is only a pause. `old_legs` are at most those that ran before it was probed.
    `credit` is how many requests it may begin while it is rationed. `level` follows from all this, see
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
        """What its standing should be."""
        if self.silent_since_s is not None:
            return HealthLevel.SILENT
        if self.out_until_s is not None:
            return HealthLevel.EJECTED
        if self.probing:
            return HealthLevel.PROBING
        return HealthLevel.HEALTHY if self.ramp is None else HealthLevel.SLOW_START

    @property
    def next_due(self) -> float:
        """When time alone changes something; infinite when it never does."""
        out = math.inf if self.out_until_s is None else self.out_until_s
        return out if self.ramp is None else min(out, self.ramp.until_s)

    def share(self, now: float) -> float:
        """The part of its peers' load that it may have by its ramp."""
        return 1.0 if self.ramp is None else self.ramp.at(now)

    def has_enough(self, now: float) -> bool:
        """Whether it has all that it may while it probes or starts slowly. Its part of what its peers run is
        no bound where requests are so short that few run at once; its part of what they begin is none where
        its own take long."""
        if self.level is HealthLevel.PROBING:
            return self.legs > self.old_legs
        if self.level is HealthLevel.EJECTED:
            # Of a pool that is used as a whole. Who fails at once looks idle, and would draw everything.
            return self.credit < 1.0 and self.pool.counts[HealthLevel.HEALTHY] > 0
        at_once = max(1, int(self.share(now) * (1.0 + self.pool.mean_legs)))
        return self.legs >= at_once or self.credit < 1.0

    def spend(self, started: int) -> None:
        """It was given so many requests."""
        self.credit = max(0.0, self.credit - started)

    def earn(self, started: float, now: float) -> None:
        """Each of its healthy peers was given so many, on average."""
        self.credit = min(MOST_CREDIT, self.credit + self.share(now) * started)


@dataclass(slots=True, eq=False)
class Pool:
    """Workers that may stand in for each other. `counts` are by standing; `healthy_legs` is the sum over
    those that stand well."""

    name: str
    members: dict[str, WorkerHealth] = field(default_factory=dict)
    counts: dict[HealthLevel, int] = field(default_factory=lambda: dict.fromkeys(HealthLevel, 0))
    healthy_legs: int = 0

    @property
    def mean_legs(self) -> float:
        """What a healthy worker runs."""
        return self.healthy_legs / max(1, self.counts[HealthLevel.HEALTHY])

    def panics(self, most: float) -> bool:
        """Whether more than this fraction of it looks bad."""
        return sum(self.counts[each] for each in BAD) > most * len(self.members)

    def seasoned(self, since: float) -> bool:
        """Whether some worker that stands well has been here since then."""
        return any(
            member.level is HealthLevel.HEALTHY and member.joined_s <= since
            for member in self.members.values()
        )

    def slow_starters(self) -> Iterable[WorkerHealth]:
        """Those whose share grows."""
        return [member for member in self.members.values() if member.level is HealthLevel.SLOW_START]

    def slowness_of_peers(self, member: WorkerHealth) -> float | None:
        """The median over the others of which anything is known."""
        peers = [peer.slowness.log for peer in self.members.values() if peer.slowness.samples]
        if member.slowness.samples:
            peers.remove(member.slowness.log)
        return math.exp(median(peers)) if peers else None

    def enter(self, member: WorkerHealth) -> None:
        """Count a member where it should stand."""
        member.level = member.derived
        self.counts[member.level] += 1
        if member.level is HealthLevel.HEALTHY:
            self.healthy_legs += member.legs

    def quit(self, member: WorkerHealth) -> None:
        """Count a member no more."""
        self.counts[member.level] -= 1
        if member.level is HealthLevel.HEALTHY:
            self.healthy_legs -= member.legs
