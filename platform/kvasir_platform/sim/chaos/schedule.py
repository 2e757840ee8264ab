"""The faults of a simulated cluster and their times.

A schedule is drawn from a seed before anything runs, so that it can be printed, reduced by hand and run
again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from kvasir.ports.clock import Rng

FIRST_FAULT_S = 1.0
# A worker that came back does not count as serving until it has been found, joined and is out of slow start.
RECOVERY_S = 6.0


class FaultKind(StrEnum):
    """See sim.core.faults. After KILL and VANISH the worker restarts at the same address."""

    FREEZE = "freeze"
    PARTITION = "partition"
    PARTITION_ROUTER = "partition from one router"
    CUT = "cut"
    BAD_LINE = "bad line"
    SLOW = "slow engine"
    KILL = "kill"
    VANISH = "vanish"
    RESTART = "planned restart"
    STALE = "stale load"
    FAIL = "fails every leg"
    JOIN = "join"
    KILL_ROUTER = "kill a router"


_WEIGHTS = {
    FaultKind.FREEZE: 4,
    FaultKind.PARTITION: 4,
    FaultKind.PARTITION_ROUTER: 2,
    FaultKind.CUT: 4,
    FaultKind.BAD_LINE: 3,
    FaultKind.SLOW: 2,
    FaultKind.KILL: 5,
    FaultKind.VANISH: 3,
    FaultKind.RESTART: 4,
    FaultKind.STALE: 1,
    FaultKind.FAIL: 2,
    FaultKind.JOIN: 1,
    FaultKind.KILL_ROUTER: 2,
}
# With these faults the worker still serves all its requests.
_BEARABLE = frozenset(
    {
        FaultKind.CUT,
        FaultKind.BAD_LINE,
        FaultKind.SLOW,
        FaultKind.STALE,
        FaultKind.JOIN,
        FaultKind.KILL_ROUTER,
    }
)


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """The cluster: workers per pool by the pool's name, routers, and what follows a failed pull."""

    prefill: int
    decode: int
    both: int
    disaggregation: str
    routers: int
    on_failure: str = "recompute"

    @property
    def pools(self) -> dict[str, tuple[str, ...]]:
        """The ids of its workers, by pool."""
        ids: dict[str, tuple[str, ...]] = {}
        number = 0
        for pool, count in (("prefill", self.prefill), ("decode", self.decode), ("both", self.both)):
            if count:
                ids[pool] = tuple(f"{pool}-{number + each}" for each in range(count))
            number += count
        return ids


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: from `at_s` for `lasts_s`. `victim` is a worker, a router's number, or the pool that grows;
    `router` is a router's number, `amount` the strength if the fault has one."""

    at_s: float
    kind: FaultKind
    victim: str
    lasts_s: float = 0.0
    router: int = 0
    amount: float = 0.0

    def __str__(self) -> str:
        strength = f" ({self.amount:.2f})" if self.amount else ""
        lasts = f" for {self.lasts_s:.2f} s" if self.lasts_s else ""
        return f"{self.kind}{strength}: {self.victim}{lasts}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A complete history before it runs. The workload follows from `seed` and `requests`, which arrive within
    `seconds`."""

    seed: int
    shape: ClusterShape
    requests: int
    seconds: float
    faults: tuple[Fault, ...]


def draw(seed: int) -> Schedule:
    """The schedule of a seed. It leaves one serving worker in each pool at all times, so that no request has
    a reason to fail."""
    rng = Random(f"{seed}/schedule")  # noqa: S311 - a schedule has to repeat
    apart = rng.random() < 0.75
    shape = ClusterShape(
        prefill=2 if apart else 0,
        decode=2 + rng.randrange(2) if apart else 0,
        both=0 if apart else 3,
        disaggregation="always" if apart else "never",
        routers=2 if rng.random() < 0.3 else 1,
    )
    seconds = 30.0
    faults: list[Fault] = []
    for _ in range(2 + rng.randrange(5)):
        fault = _draw_fault(rng, shape, seconds)
        if _bearable(fault, faults, shape):
            faults.append(fault)
    faults.sort(key=lambda fault: fault.at_s)
    requests = 14 + rng.randrange(10)
    shape = replace(shape, on_failure="fail" if rng.random() < 0.3 else "recompute")
    return Schedule(seed, shape, requests=requests, seconds=seconds, faults=tuple(faults))


def _draw_fault(rng: Rng, shape: ClusterShape, seconds: float) -> Fault:
    kinds = [kind for kind, weight in _WEIGHTS.items() for _ in range(weight)]
    kind = kinds[rng.randrange(len(kinds))]
    pools = shape.pools
    pool = list(pools)[rng.randrange(len(pools))]
    victim = pools[pool][rng.randrange(len(pools[pool]))]
    at_s = FIRST_FAULT_S + rng.random() * seconds * 0.8
    router = rng.randrange(shape.routers)
    match kind:
        case FaultKind.JOIN:
            return Fault(at_s, kind, pool)
        case FaultKind.CUT:
            return Fault(at_s, kind, victim)
        case FaultKind.KILL_ROUTER:
            return Fault(at_s, kind, "router", 0.5 + 3.0 * rng.random(), router)
        case FaultKind.SLOW:
            return Fault(at_s, kind, victim, 1.0 + 5.0 * rng.random(), amount=2.0 + 6.0 * rng.random())
        case FaultKind.BAD_LINE:
            return Fault(at_s, kind, victim, 1.0 + 5.0 * rng.random(), amount=0.01 + 0.2 * rng.random())
        case _:
            # Some faults are over before they are detected, some outlast every timeout.
            return Fault(at_s, kind, victim, 0.05 + 14.0 * rng.random() ** 3, router)


def _bearable(fault: Fault, others: list[Fault], shape: ClusterShape) -> bool:
    """Whether every pool still serves, and no victim has two faults at the same time."""
    if fault.kind is FaultKind.KILL_ROUTER:
        return shape.routers > 1 and not any(other.kind is fault.kind for other in others)
    if fault.kind is FaultKind.PARTITION_ROUTER and shape.routers == 1:
        return False
    meanwhile = [other for other in others if _overlap(fault, other)]
    if any(other.victim == fault.victim for other in meanwhile):
        return False
    if fault.kind in _BEARABLE:
        return True
    (peers,) = [ids for ids in shape.pools.values() if fault.victim in ids]
    down = {other.victim for other in meanwhile if other.kind not in _BEARABLE} | {fault.victim}
    return not down.issuperset(peers)


def _overlap(one: Fault, other: Fault) -> bool:
    return (
        one.at_s <= other.at_s + other.lasts_s + RECOVERY_S
        and other.at_s <= one.at_s + one.lasts_s + RECOVERY_S
    )
