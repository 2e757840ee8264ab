"""Ranks routing policies by goodput: the highest rate of a workload at which enough requests meet the SLO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvasir_platform.sim.server.bound import FluidBound, fluid_bound
from kvasir_platform.sim.server.results import ServerResult
from kvasir_platform.sim.server.scaling import planned
from kvasir_platform.sim.server.server import ServerSimulation
from kvasir_platform.sim.server.setting import RunLimits, ServerSetting
from kvasir_platform.workload.requests import Workload

_WIDEST = 64.0


@dataclass(frozen=True, slots=True)
class RateSearch:
    """`attained` is the part of requests that must meet the SLO. The result is at most `precision` (relative)
    below the true limit, and `runs` bounds the runs of one policy."""

    attained: float = 0.9
    precision: float = 0.05
    runs: int = 16


@dataclass(frozen=True, slots=True)
class PolicyRank:
    """One policy: its goodput in requests per second that meet the SLO, that as a part of the bound, and the
    run at that rate; None if no rate was low enough."""

    policy: str
    goodput: float
    of_bound: float
    result: ServerResult | None


@dataclass(frozen=True, slots=True)
class PolicyComparison:
    """The ranks, the best first, and the bound."""

    bound: FluidBound
    ranks: tuple[PolicyRank, ...]


def compare(
    setting: ServerSetting,
    policies: Sequence[str],
    search: RateSearch,
    *,
    clock: Callable[[], float],
    workload_at: Callable[[float], Workload] | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> PolicyComparison:
    """Search every policy's goodput. `workload_at` returns the workload at a multiple of its rate; without
    it, the same requests arrive closer together or farther apart. The bound is that of the largest fleet that
    the planner may make."""
    bound = fluid_bound(setting.largest())
    begin = setting.workload
    rate = len(begin.requests) / max(begin.duration_s, 1e-9)
    start = 0.7 * bound.requests_per_s / rate
    made: dict[float, Workload] = {}

    def at(factor: float) -> Workload:
        if factor not in made:
            made[factor] = begin.sped_up(factor) if workload_at is None else workload_at(factor)
        return made[factor]

    ranks = []
    for policy in policies:
        result = best_rate(setting.with_policy(policy), search, start, at, clock)
        goodput = 0.0 if result is None else result.whole_goodput
        ranks.append(PolicyRank(policy, goodput, goodput / bound.requests_per_s, result))
        tell(f"{policy}: {goodput:.2f} requests/s")
    ranks.sort(key=lambda each: -each.goodput)
    return PolicyComparison(bound, tuple(ranks))


def best_rate(
    setting: ServerSetting,
    search: RateSearch,
    start: float,
    workload_at: Callable[[float], Workload],
    clock: Callable[[], float],
) -> ServerResult | None:
    """Return the run at the highest factor found of the workload's rate at which the SLO was attained."""
    found: dict[float, ServerResult] = {}

    def meets(factor: float) -> bool:
        workload = workload_at(factor)
        limits = RunLimits(tail_s=workload.duration_s + 60.0)
        simulation = ServerSimulation(replace(setting, workload=workload), clock=clock, limits=limits)
        result = planned(simulation).run()
        if result.attainment < search.attained:
            return False
        found[factor] = result
        return True

    low, high, step = start, start, 1.25
    runs = 1
    if meets(start):
        high = low * step
        while runs < search.runs and high < start * _WIDEST and meets(high):
            runs, low, step = runs + 1, high, step * step
            high *= step
    else:
        low = high / step
        while runs < search.runs and low > start / _WIDEST and not meets(low):
            runs, high, step = runs + 1, low, step * step
            low /= step
    while found and high > low * (1.0 + search.precision) and runs < search.runs:
        middle = (low * high) ** 0.5
        runs += 1
        low, high = (middle, high) if meets(middle) else (low, middle)
    return found[max(found)] if found else None
