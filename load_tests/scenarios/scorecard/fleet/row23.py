"""Histories with faults drawn from a seed, each run twice: both runs are identical to the last event. In
virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvasir_platform.sim.chaos.rows import row_23
from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial

PROMISE = "replays exactly"
AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Size:
    """Number of seeds, starting with the trial's."""

    seeds: int = 1000


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    parts = []
    end = trial.seed + size.seeds
    for begin in range(trial.seed, end, AT_ONCE):
        parts.append(await asyncio.to_thread(row_23, range(begin, min(end, begin + AT_ONCE))))
        trial.say(f"{sum(part.seeds for part in parts)} seeds, {parts[-1].times_real_time:.0f} x real time")
    unequal = [seed for part in parts for seed in part.unequal]
    broken = [seed for part in parts for seed in part.broken]
    faults = sum(part.faults for part in parts)
    migrations = sum(part.migrations for part in parts)
    if not faults or not migrations:
        raise NotProven(f"{faults} faults and {migrations} migrations in {size.seeds} histories")
    speed = sum(part.virtual_s for part in parts) / sum(part.wall_s for part in parts)
    note = f"seeds {trial.seed} to {end - 1}: {faults:,} faults, {migrations:,} migrations"
    return [
        Figure("histories that replay exactly", size.seeds - len(unequal), "histories", "higher", size.seeds,
               f"{note}; unequal: {unequal[:10] or 'none'}"),
        Figure("histories with a broken invariant", len(broken), "histories", "lower", 0.0,
               f"seeds {broken[:10]}" if broken else ""),
        Figure("speed", speed, "x real time", "higher", 100.0),
    ]  # fmt: skip
