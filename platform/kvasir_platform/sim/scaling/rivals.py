"""Rules by which fleets are commonly sized, to be compared with: each looks at one figure of its pool.

static       as many as the peak takes, always
hpa          Kubernetes' HorizontalPodAutoscaler on utilisation, with its own constants
queue        requests in line and at work over a target for each replica, as KEDA is commonly set up
ttft         more when the time to first token nears its promise, fewer when it is far from it
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvasir.core.requests import Role
from kvasir.ports.scaler import ReplicaState
from kvasir_platform.sim.scaling.fleet import ScaledFleet

SYNC_S = 15.0
"""Between two looks: the HorizontalPodAutoscaler's own period."""
_TOLERANCE = 0.1
"""The HorizontalPodAutoscaler leaves a ratio alone that is this near to 1."""
Rule = Callable[[ScaledFleet, str, Role, int, float], int]
"""(fleet, pool, role, replicas that there are, now) -> replicas wished for."""


@dataclass(slots=True)
class Held:
    """Down only to the most that was wished for within `seconds`."""

    seconds: float
    _wishes: deque[tuple[float, int]] = field(default_factory=deque)

    def hold(self, wish: int, now: float) -> int:
        """The most of the window."""
        self._wishes.append((now, wish))
        while self._wishes[0][0] < now - self.seconds:
            self._wishes.popleft()
        return max(each for _, each in self._wishes)


def static(sizes: dict[str, int]) -> Rule:
    """Always as many."""
    return lambda _fleet, pool, _role, _have, _now: sizes[pool]


def hpa(target: float, stays_s: float) -> Rule:
    """ceil(replicas x utilisation / target), averaged over a minute as metrics adapters do; up by no more
    than four or the double at once, down after `stays_s` (kubernetes.io, HorizontalPodAutoscaler, algorithm
    details and default behavior)."""
    held: dict[str, Held] = {}
    seen: dict[str, deque[float]] = {}

    def rule(fleet: ScaledFleet, pool: str, role: Role, have: int, now: float) -> int:
        values = seen.setdefault(pool, deque(maxlen=4))
        values.append(fleet.busy(role))
        ratio = sum(values) / len(values) / target
        ready = max(1, len(fleet.serving(pool)))
        wish = have if abs(ratio - 1.0) <= _TOLERANCE else math.ceil(ready * ratio)
        wish = min(wish, max(2 * have, have + 4))
        return held.setdefault(pool, Held(stays_s)).hold(wish, now)

    return rule


def queue(target: float, stays_s: float) -> Rule:
    """ceil(requests in line and at work / target)."""
    held: dict[str, Held] = {}

    def rule(fleet: ScaledFleet, pool: str, role: Role, have: int, now: float) -> int:
        wish = math.ceil(fleet.queued(role) / target)
        return held.setdefault(pool, Held(stays_s)).hold(wish, now)

    return rule


def ttft(promise_s: float, high: float, low: float, stays_s: float) -> Rule:
    """A quarter more when the 90th percentile of the last minute is above `high` of the promise, one less
    when it is below `low` of it and none has gone for `stays_s`."""
    seen: deque[float] = deque(maxlen=4000)
    changed: dict[str, float] = {}

    def rule(fleet: ScaledFleet, pool: str, role: Role, have: int, now: float) -> int:
        if role is Role.PREFILL:
            seen.extend(fleet.recent.ttfts)
            fleet.recent.ttfts.clear()
        last = sorted(list(seen)[-600:])
        if not last:
            return have
        p90 = last[int(0.9 * len(last))]
        since = now - changed.get(pool, 0.0)
        if p90 > high * promise_s and since >= 60.0:
            changed[pool] = now
            return have + math.ceil(0.25 * have)
        if p90 < low * promise_s and since >= stays_s:
            changed[pool] = now
            return have - 1
        return have

    return rule


def play(fleet: ScaledFleet, rule: Rule, pools: dict[str, tuple[Role, int]], length_s: float) -> ScaledFleet:
    """The whole day under a rule. `pools` are the bounds above, by name with their roles."""
    now = 0.0
    while now < length_s:
        now += SYNC_S
        fleet.run(now)
        for name, (role, most) in pools.items():
            have = fleet.size(name)
            wish = min(most, max(1, rule(fleet, name, role, have, now)))
            if wish > have:
                fleet.start(name, wish - have)
            elif wish < have:
                own = [
                    each
                    for each in fleet.observe()
                    if each.pool == name and each.state is not ReplicaState.LEAVING
                ]
                own.sort(key=lambda each: (each.state is ReplicaState.SERVING, -each.since_s))
                fleet.retire(name, [each.replica_id for each in own[: have - wish]])
    fleet.end()
    return fleet
