"""Every worker answers 503: number of legs per request. In virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvasir_platform.sim.chaos.rows import row_11
from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial

PROMISE = "no retry storm"


@dataclass(frozen=True, slots=True)
class Size:
    """One history per seed."""

    seeds: int = 5


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    storms = [await asyncio.to_thread(row_11, trial.seed + each) for each in range(size.seeds)]
    served = sum(storm.served_during for storm in storms)
    requests = sum(storm.requests for storm in storms)
    if served or not requests:
        raise NotProven(f"{served} of {requests} requests were served while every worker refused")
    after = sum(storm.served_after for storm in storms) / sum(storm.requests_after for storm in storms)
    worst = max(storm.amplification for storm in storms)
    note = f"virtual time, {size.seeds} seeds, {requests:,} requests that all were refused"
    return [
        Figure("legs for each request", worst, "x", "lower", 1.2, note),
        Figure("served once workers serve again", after * 100, "%", "higher", None, "from 10 s after"),
    ]
