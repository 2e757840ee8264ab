"""Error bars: what a plan gives if its coefficients are worse, or better, than assumed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvasir_platform.capacity.pools import Experience, Pair
from kvasir_platform.capacity.search import CapacityPlan, PlannedPool, experience


@dataclass(frozen=True, slots=True)
class BoundedValue:
    """A value with its bounds."""

    low: float
    value: float
    high: float


@dataclass(frozen=True, slots=True)
class ErrorBars:
    """TTFT and ITL at the peak in seconds, and requests per second that meet the SLO then."""

    ttft_s: BoundedValue
    itl_s: BoundedValue
    goodput: BoundedValue


def error_bars(plan: CapacityPlan, rate: float) -> ErrorBars:
    """Return what the plan's replicas for the peak give at `rate`, its peak, with either bound."""
    slow, fast = _Varied(plan, slow=True), _Varied(plan, slow=False)
    peak, worst, best = plan.peak, slow.at(rate), fast.at(rate)
    return ErrorBars(
        BoundedValue(best.ttft_s, peak.ttft_s, worst.ttft_s),
        BoundedValue(best.itl_s, peak.itl_s, worst.itl_s),
        BoundedValue(slow.goodput(rate), rate * peak.met, fast.goodput(rate)),
    )


class _Varied:
    """A plan with other coefficients."""

    def __init__(self, plan: CapacityPlan, *, slow: bool) -> None:
        self._pools = [_pool(pool, slow=slow) for pool in plan.pools]
        first, last = self._pools[0].engine, self._pools[-1].engine
        self._pair = plan.pair and Pair(first, last, plan.pair.bytes_per_s)
        self._target = plan.peak.target

    def at(self, rate: float) -> Experience:
        """Return what requests see at a rate."""
        replicas = tuple(pool.replicas for pool in self._pools)
        return experience(self._pools, self._pair, replicas, rate, self._target)

    def goodput(self, rate: float) -> float:
        """Return the requests per second that meet the SLO if so many arrive at most, the rest being
        refused."""
        if (seen := self.at(rate)).meets:
            return rate * seen.met
        low, high = 0.0, rate
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (middle, high) if self.at(middle).meets else (low, middle)
        return low * self.at(low).met if low else 0.0


def _pool(pool: PlannedPool, *, slow: bool) -> PlannedPool:
    assumed = pool.engine.option.hardware.assumed
    return replace(pool, engine=pool.engine.varied(assumed.slow if slow else assumed.fast))
