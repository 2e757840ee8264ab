"""Raises the rate until the SLO breaks, and finds the highest rate at which it holds. Pure but for the runs
that it asks for.

The rate is multiplied by `step` until too few requests meet the SLO; the range between the last rate that was
good and the first that was not is then halved (geometrically) to `precision`. The knee is the highest good
rate found, and the breaking point lies between it and the lowest bad one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvasir_platform.bench.figures import BenchFigures


@dataclass(frozen=True, slots=True)
class RampPlan:
    """`met` is the share of requests that must meet the SLO. No rate below `least` is tried, nor one above
    `most`."""

    start: float = 1.0
    step: float = 2.0
    least: float = 0.1
    most: float = 10_000.0
    met: float = 0.9
    precision: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 < self.least <= self.start < self.most:
            raise ValueError("start: from least, which is above 0, and below most")
        if not (self.step > 1.0 and 0.0 < self.met <= 1.0):
            raise ValueError("step: above 1, and met: above 0 and at most 1")
        if not 0.001 <= self.precision < 1.0:
            raise ValueError("precision: from 0.001, below 1")


@dataclass(frozen=True, slots=True)
class RampPoint:
    """The figures at one rate, in requests per second."""

    rate: float
    held: bool
    figures: BenchFigures


@dataclass(frozen=True, slots=True)
class BenchRamp:
    """All points by rate. `knee` is the highest rate at which the SLO held, 0 if at none; `broken` the lowest
    at which it did not, None if it held at all."""

    points: tuple[RampPoint, ...]
    plan: RampPlan

    @property
    def broken(self) -> float | None:
        """As above."""
        return min((each.rate for each in self.points if not each.held), default=None)

    @property
    def knee(self) -> float:
        """As above; a rate above one that was bad does not count."""
        limit = self.broken
        held = [each.rate for each in self.points if each.held and (limit is None or each.rate < limit)]
        return max(held, default=0.0)

    @property
    def best_goodput(self) -> float:
        """The highest goodput of any point, in requests per second."""
        return max((each.figures.goodput_per_s for each in self.points), default=0.0)


class RampSearch:
    """Runs `measure(rate)` at each rate that it needs. `points` are those measured so far, so that a search
    that is cancelled has its results."""

    def __init__(self, plan: RampPlan, measure: Callable[[float], Awaitable[BenchFigures]]) -> None:
        self._plan = plan
        self._measure = measure
        self._points: list[RampPoint] = []

    @property
    def found(self) -> BenchRamp:
        """What was found so far."""
        return BenchRamp(tuple(sorted(self._points, key=lambda each: each.rate)), self._plan)

    async def run(self) -> BenchRamp:
        """Search to the end."""
        plan = self._plan
        good, rate = 0.0, plan.start
        while await self._holds(rate):
            good = rate
            if rate >= plan.most:
                return self.found
            rate = min(plan.most, rate * plan.step)
        bad = rate
        while good == 0.0:
            rate = bad / plan.step
            if rate < plan.least:
                return self.found
            if await self._holds(rate):
                good = rate
            else:
                bad = rate
        while bad > good * (1.0 + plan.precision):
            middle = (good * bad) ** 0.5
            if await self._holds(middle):
                good = middle
            else:
                bad = middle
        return self.found

    async def _holds(self, rate: float) -> bool:
        figures = await self._measure(rate)
        held = figures.slo_share >= self._plan.met
        self._points.append(RampPoint(rate, held, figures))
        return held
