"""A worker with a cold cache joins a warm fleet: TTFT does not rise. In virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvasir_platform.sim.chaos.rows import row_14
from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial

PROMISE = "slow start"


@dataclass(frozen=True, slots=True)
class Size:
    """One history per seed."""

    seeds: int = 5


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    joined = [await asyncio.to_thread(row_14, trial.seed + each) for each in range(size.seeds)]
    if not all(each.last_share for each in joined):
        raise NotProven("the worker that joined was given nothing")
    worst = max(joined, key=lambda each: each.ratio)
    return [
        Figure(
            "p99 of times to first token after it joined, to that before", worst.ratio, "x", "lower", 1.2,
            f"virtual time, worst of {size.seeds} seeds: {worst.before_p99_s * 1e3:.0f} ms before, "
            f"{worst.after_p99_s * 1e3:.0f} ms after; its share of requests {worst.first_share:.2f} in the "
            f"first second, {worst.last_share:.2f} in the last",
        )
    ]  # fmt: skip
