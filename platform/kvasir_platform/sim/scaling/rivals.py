"""Rules by which fleets are commonly sized, to be compared with: each looks at one figure of its pool.

Static   as many as the peak takes, always
Hpa      Kubernetes' HorizontalPodAutoscaler on utilisation, with its own constants
Queue    requests in line and at work over a target for each replica, as KEDA is commonly set up
Ttft     more when the time to first token nears its promise, fewer when it is far from it

Every rule has a figure of its own for each role: what fills a replica that computes prompts is not what fills
one that decodes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvasir.core.requests import Role
from kvasir.ports.scaler import ReplicaState
from kvasir_platform.sim.scaling.fleet import ScaledFleet

SYNC_S = 15.0
"""Between two decisions: the HorizontalPodAutoscaler's own period."""
LOOK_S = 5.0
"""Between two readings of the figures."""
AVERAGED_S = 60.0
"""Metrics adapters average over a minute."""
_TOLERANCE = 0.1
"""The HorizontalPodAutoscaler ignores ratios this near to 1."""
_ROLES = (Role.PREFILL, Role.DECODE)


class Rule(Protocol):
    """One per fleet: rules have state."""

    def look(self, fleet: ScaledFleet) -> None:
        """Called every LOOK_S."""
        ...

    def desired(self, fleet: ScaledFleet, pool: str, role: Role, now: float) -> int:
        """Called every SYNC_S: how many replicas the pool should have."""
        ...


@dataclass(slots=True)
class HeldMaximum:
    """Scale down only to the largest size desired within `seconds`, beginning with the current number."""

    seconds: float
    _desired_sizes: deque[tuple[float, int]] = field(default_factory=deque)

    def hold(self, desired: int, have: int, now: float) -> int:
        """The largest of the window."""
        if not self._desired_sizes:
            self._desired_sizes.append((now, have))
        self._desired_sizes.append((now, desired))
        while self._desired_sizes[0][0] < now - self.seconds:
            self._desired_sizes.popleft()
        return max(each for _, each in self._desired_sizes)


class MovingMean:
    """The mean of the last `seconds` of a figure, by role."""

    def __init__(self, seconds: float, figure: Callable[[ScaledFleet, Role], float]) -> None:
        self._figure = figure
        self._values: dict[Role, deque[float]] = {
            role: deque(maxlen=max(1, round(seconds / LOOK_S))) for role in _ROLES
        }

    def look(self, fleet: ScaledFleet) -> None:
        """Read the figure of both roles."""
        for role, values in self._values.items():
            values.append(self._figure(fleet, role))

    def mean(self, role: Role) -> float:
        """The mean of the readings in the window."""
        values = self._values[role]
        return sum(values) / len(values)


class Static:
    """A constant size: `sizes` by pool."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes

    def look(self, fleet: ScaledFleet) -> None:
        """See Rule."""

    def desired(self, fleet: ScaledFleet, pool: str, role: Role, now: float) -> int:
        """See Rule."""
        return self._sizes[pool]


class Hpa:
    """ceil(ready replicas x utilization / target); up by at most four or the double at once, down after
    `stays_s`, no change while the ratio is near 1 or when starting replicas reverse it (kubernetes.io,
    HorizontalPodAutoscaler, algorithm details and default behavior). Utilization is the share of time in
    which prefill workers compute, and the share of seats or memory that decode workers use."""

    def __init__(self, targets: Mapping[Role, float], stays_s: float) -> None:
        self._targets = targets
        self._busy = MovingMean(AVERAGED_S, ScaledFleet.busy)
        self._held = {role: HeldMaximum(stays_s) for role in _ROLES}

    def look(self, fleet: ScaledFleet) -> None:
        """See Rule."""
        self._busy.look(fleet)

    def desired(self, fleet: ScaledFleet, pool: str, role: Role, now: float) -> int:
        """See Rule."""
        have, ready = fleet.size(pool), len(fleet.serving(pool))
        ratio = self._busy.mean(role) / self._targets[role]
        desired = math.ceil(max(1, ready) * ratio)
        if abs(ratio - 1.0) <= _TOLERANCE or (ratio > 1.0 and desired < have):
            desired = have
        return self._held[role].hold(_at_once(desired, have), have, now)


class Queue:
    """ceil(requests waiting and running / target), down after `stays_s`; up as Hpa, which KEDA drives."""

    def __init__(self, targets: Mapping[Role, float], stays_s: float) -> None:
        self._targets = targets
        self._there = MovingMean(SYNC_S, lambda fleet, role: float(fleet.queued(role)))
        self._held = {role: HeldMaximum(stays_s) for role in _ROLES}

    def look(self, fleet: ScaledFleet) -> None:
        """See Rule."""
        self._there.look(fleet)

    def desired(self, fleet: ScaledFleet, pool: str, role: Role, now: float) -> int:
        """See Rule."""
        desired, have = math.ceil(self._there.mean(role) / self._targets[role]), fleet.size(pool)
        return self._held[role].hold(_at_once(desired, have), have, now)


class Ttft:
    """A quarter more prefill workers when the 90th percentile of the last minute is above `high` of the SLO,
    at most once a minute; one less when it is below `low` of it and nothing has changed for `stays_s`. TTFT
    says nothing about decode workers: they follow their seats, as with Hpa."""

    def __init__(self, promise_s: float, between: tuple[float, float], seats: float, stays_s: float) -> None:
        self._low_s, self._high_s = (promise_s * each for each in between)
        self._stays_s = stays_s
        self._seats = Hpa({Role.PREFILL: 1.0, Role.DECODE: seats}, stays_s)
        self._seen: deque[tuple[float, float]] = deque()
        self._changed_s = 0.0

    def look(self, fleet: ScaledFleet) -> None:
        """See Rule."""
        self._seats.look(fleet)
        self._seen.extend((fleet.now, each) for each in fleet.recent.ttfts)
        fleet.recent.ttfts.clear()
        while self._seen and self._seen[0][0] < fleet.now - AVERAGED_S:
            self._seen.popleft()

    def desired(self, fleet: ScaledFleet, pool: str, role: Role, now: float) -> int:
        """See Rule."""
        if role is Role.DECODE:
            return self._seats.desired(fleet, pool, role, now)
        have = fleet.size(pool)
        if not self._seen:
            return have
        last = sorted(each for _, each in self._seen)
        p90_s, since_s = last[int(0.9 * len(last))], now - self._changed_s
        if p90_s > self._high_s and since_s >= AVERAGED_S:
            have += math.ceil(0.25 * have)
            self._changed_s = now
        elif p90_s < self._low_s and since_s >= self._stays_s:
            have -= 1
            self._changed_s = now
        return have


def _at_once(desired: int, have: int) -> int:
    """What a HorizontalPodAutoscaler adds within SYNC_S, at most."""
    return min(desired, max(2 * have, have + 4))


def play(
    fleet: ScaledFleet,
    rule: Rule,
    pools: Mapping[str, tuple[Role, int]],
    length_s: float,
    give_up: Callable[[ScaledFleet], bool] = lambda _fleet: False,
) -> ScaledFleet:
    """Run the whole day under a rule, or until `give_up`, which is called every SYNC_S. `pools` are the upper
    bounds, by name with their roles."""
    now, due = 0.0, SYNC_S
    while now < length_s:
        now += LOOK_S
        fleet.run(now)
        rule.look(fleet)
        if now < due:
            continue
        due += SYNC_S
        for name, (role, most) in pools.items():
            _resize(fleet, name, min(most, max(1, rule.desired(fleet, name, role, now))))
        if give_up(fleet):
            return fleet
    fleet.end()
    return fleet


def _resize(fleet: ScaledFleet, pool: str, desired: int) -> None:
    """Replicas that do not serve yet go first, then the youngest."""
    have = fleet.size(pool)
    if desired > have:
        fleet.start(pool, desired - have)
    elif desired < have:
        own = [e for e in fleet.observe() if e.pool == pool and e.state is not ReplicaState.LEAVING]
        own.sort(key=lambda each: (each.state is ReplicaState.SERVING, -each.since_s))
        fleet.retire(pool, [each.replica_id for each in own[: have - desired]])
