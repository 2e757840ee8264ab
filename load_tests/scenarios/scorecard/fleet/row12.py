"""Six workers of ten fail, or loads are not reported: the fleet keeps serving. In virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvasir_platform.sim.chaos.rows import row_12_stale, row_12_unhealthy
from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial

PROMISE = "panic mode, fail static"


@dataclass(frozen=True, slots=True)
class Size:
    """One history of each kind per seed."""

    seeds: int = 5


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    seeds = [trial.seed + each for each in range(size.seeds)]
    failing = [await asyncio.to_thread(row_12_unhealthy, seed) for seed in seeds]
    stale = [await asyncio.to_thread(row_12_stale, seed) for seed in seeds]
    if not all(each.refusals for each in failing):
        raise NotProven("the failing workers were never asked")
    ends = [each.ended for each in failing] + [each.ended for each in stale]
    blackouts = sum(not each.get("ok") for each in ends)
    goodput = min(each.goodput for each in failing)
    served = min(each.ended.get("ok", 0) / each.requests for each in stale)
    panics = sum(each.panicked for each in failing)
    return [
        Figure(
            "histories in which nothing was served", blackouts, "histories", "lower", 0.0,
            f"virtual time, {size.seeds} seeds of each kind; panic mode in {panics}",
        ),
        Figure(
            "served with 60 % of the workers failing", goodput * 100, "%", "higher",
            failing[0].fair * 100, "promised: the share of workers that serve; the least of all seeds",
        ),
        Figure("served with loads that are stale", served * 100, "%", "higher", 100.0,
               f"unevenness of legs {max(each.max_over_mean for each in stale):.2f}"),
    ]  # fmt: skip
