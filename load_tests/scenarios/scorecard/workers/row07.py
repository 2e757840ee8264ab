"""KV events are lost, repeated and reordered: routers take snapshots, and at rest know what workers hold.

Simulated: transport, workers and time, with the router's index.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.kit.cores import over_cores
from tests.kit.index.histories import Played, play

from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial

PROMISE = "gap, then snapshot"
AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class Size:
    """Number of histories, whose seeds start with the trial's."""

    histories: int = 100_000


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    played = Played.sum(())
    first, end = trial.seed, trial.seed + size.histories
    for begin in range(first, end, AT_ONCE):
        parts = await asyncio.to_thread(over_cores, play, range(begin, min(end, begin + AT_ONCE)))
        played = Played.sum((played, *parts))
        trial.say(f"{min(end, begin + AT_ONCE) - first:,} histories, {len(played.failed)} diverge")
    faults = {kind: played.faults[kind] for kind in ("lost", "repeated", "reordered")}
    if not all(faults.values()):
        raise NotProven(f"batches of events: {faults}")
    note = f"seeds {first} to {end - 1}; batches of events: "
    note += ", ".join(f"{count:,} {kind}" for kind, count in faults.items())
    if played.failed:
        seed, error = min(played.failed.items())
        note += f"; seed {seed}: {error[:200]}"
    what = "histories in which a router's view differs from a cache"
    return [Figure(what, len(played.failed), "histories", "lower", 0.0, note)]
