"""What every loss is judged by, and the load under which it happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.kit.lab.fleet import Fleet, LabWorker
from tests.kit.lab.gateway import until
from tests.kit.lab.load import OpenLoop, asks
from tests.kit.lab.stream import Ask, Outcome

from load_tests.scenarios.scorecard.common import Figure, Trial, exactness, seen

LONGEST_GAP_S = 3.0
"""The promise of docs/FAILURES.md for a lost worker."""
PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Load:
    """Streams of `tokens` tokens that arrive at random, `rate` a second, from `before_s` seconds before a
    loss to `after_s` seconds after all is as it was."""

    rate: float = 12.0
    tokens: int = 60
    before_s: float = 2.0
    after_s: float = 2.0


@asynccontextmanager
async def under_load(
    trial: Trial, addresses: Sequence[str], load: Load, work: Iterator[Ask] | None = None
) -> AsyncIterator[list[Outcome]]:
    """Run streams while the context runs, for simulated engines unless `work` is given; its value has all
    outcomes when it has ended."""
    loop = OpenLoop(
        addresses,
        asks(trial.rng(1), PROMPT_TOKENS, load.tokens) if work is None else work,
        load.rate,
        clock=trial.clock,
        rng=trial.rng(2),
    )
    loop.start()
    try:
        await trial.clock.sleep(load.before_s)
        yield loop.outcomes
        await trial.clock.sleep(load.after_s)
    finally:
        await loop.stop()


async def busy(fleet: Fleet, worker: LabWorker, within_s: float = 30.0) -> int:
    """Wait until streams run on the worker; return how many. Raise TimeoutError."""
    found = 0

    async def runs() -> bool:
        nonlocal found
        found = int((await seen(fleet.address, worker))["in_flight"])
        return found > 0

    await until(runs, within_s, f"streams run on {worker.name}", fleet.clock, 0.02)
    return found


def judged(outcomes: Sequence[Outcome], note: str) -> list[Figure]:
    """The three figures of a loss; `note` says what proves that it happened."""
    failed = [each for each in outcomes if each.error]
    whole = [each.longest_gap_s for each in outcomes if not each.error]
    return [
        Figure("failed requests", len(failed), "requests", "lower", 0.0, f"of {len(outcomes)}; {note}"),
        Figure("longest gap of a stream", max(whole, default=0.0), "s", "lower", LONGEST_GAP_S),
        exactness(outcomes),
    ]
