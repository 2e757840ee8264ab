"""Error bars: what a plan gives if its coefficients are worse, or better, than assumed.

Coefficients of the data sheet are fractions that engines were seen to reach on other models and hardware; the
bounds are those that the publications named at `Coefficients` report. A profile was measured, and its bounds
are the errors of its predictions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvasir.performance.coefficients import DATA_SHEET, Coefficients
from kvasir_platform.capacity.pools import Experience, Pair
from kvasir_platform.capacity.search import CapacityPlan, PlannedPool, experience

MEASURED_ERROR = 0.15
"""Relative error of the predictions of a profile, if it does not say."""


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


def bounds_of(coefficients: Coefficients, error: float | None = None) -> tuple[Coefficients, Coefficients]:
    """Return the slowest and the fastest coefficients that are likely. `error` is the relative error of a
    profile's predictions."""
    if coefficients.source == DATA_SHEET.source:
        slow = replace(
            coefficients, arithmetic=0.4, attention=0.25, bandwidth=0.6, link=0.5,
            step_s=0.003, stream_s=3e-5, request_s=0.01, collective_s=2e-5,
        )  # fmt: skip
        fast = replace(
            coefficients, arithmetic=0.65, attention=0.5, bandwidth=0.8, link=0.85,
            step_s=0.001, stream_s=1e-5, request_s=0.003, collective_s=5e-6,
        )  # fmt: skip
        return slow, fast
    part = MEASURED_ERROR if error is None else error
    return _scaled(coefficients, 1.0 + part), _scaled(coefficients, 1.0 / (1.0 + part))


def _scaled(found: Coefficients, slower: float) -> Coefficients:
    return replace(
        found,
        arithmetic=found.arithmetic / slower,
        attention=found.attention / slower,
        bandwidth=found.bandwidth / slower,
        link=found.link / slower,
        step_s=found.step_s * slower,
        stream_s=found.stream_s * slower,
        request_s=found.request_s * slower,
        collective_s=found.collective_s * slower,
    )


def error_bars(plan: CapacityPlan, rate: float, error: float | None = None) -> ErrorBars:
    """Return what the plan's replicas for the peak give at `rate`, its peak, with either bound."""
    slow, fast = (_Varied(plan, at, error) for at in (0, 1))
    peak, worst, best = plan.peak, slow.at(rate), fast.at(rate)
    return ErrorBars(
        BoundedValue(best.ttft_s, peak.ttft_s, worst.ttft_s),
        BoundedValue(best.itl_s, peak.itl_s, worst.itl_s),
        BoundedValue(slow.goodput(rate), rate * peak.met, fast.goodput(rate)),
    )


class _Varied:
    """A plan with other coefficients."""

    def __init__(self, plan: CapacityPlan, bound: int, error: float | None) -> None:
        self._pools = [_pool(pool, bound, error) for pool in plan.pools]
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


def _pool(pool: PlannedPool, bound: int, error: float | None) -> PlannedPool:
    found = bounds_of(pool.engine.option.engine.coefficients, error)[bound]
    return replace(pool, engine=pool.engine.varied(found))
