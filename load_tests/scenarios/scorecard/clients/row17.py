"""Slow and oversized requests: each is disconnected, and other clients are not affected."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.kit.lab import gateway
from tests.kit.lab.fleet import Fleet, Layout
from tests.kit.lab.load import OpenLoop, asks, quantile
from tests.kit.lab.processes import resident_bytes
from tests.kit.lab.stream import Outcome

from load_tests.scenarios.scorecard.clients.attackers import ATTACKS
from load_tests.scenarios.scorecard.common import (
    Figure,
    NotProven,
    Trial,
    engine,
    exactness,
    exercise,
    whole,
)

PROMISE = "cut off"
CUT_S = 10.0

Attack = Callable[[], Awaitable[dict[str, float]]]
"""Runs attacks. Returns for each kind how long its last client was connected, in seconds."""


@dataclass(frozen=True, slots=True)
class Size:
    """`clients` of each attack at once, beside other clients at `rate` requests per second; `pairs` of
    windows with and without the attacks."""

    workers: int = 2
    clients: int = 50
    rate: float = 10.0
    tokens: int = 30
    pairs: int = 3
    window_s: float = 20.0


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    spec = engine(sim={"decode_step_s": 0.06, "decode_step_per_seq_s": 0.0})
    async with exercise(trial, whole(spec), Layout({"both": size.workers})) as fleet:
        outcomes: list[Outcome] = []
        changes, took, grown = [], list[float](), list[float]()
        for pair in range(size.pairs):
            calm, _, brisk = await _window(trial, fleet, size, 2 * pair)
            async with _attackers(fleet.address, size.clients) as attack:
                beside, cuts, under = await _window(trial, fleet, size, 2 * pair + 1, attack)
            outcomes += [*calm, *beside]
            changes.append((under / brisk - 1.0) * 100)
            took += cuts.values()
            grown.append(resident_bytes(fleet.routers[0].process.pid) / 2**20)
            trial.say(
                f"p99 of gaps {brisk * 1e3:.1f} ms alone, {under * 1e3:.1f} ms under attack; cut after "
                + ", ".join(f"{seconds:.1f} s ({name})" for name, seconds in cuts.items())
            )
        series = await gateway.metrics(fleet.address)
        refused = {
            code: gateway.metric(series, "kvasir_requests_total", outcome=code)
            for code in ("header_timeout", "body_timeout", "headers_too_large", "body_too_large")
        }
    if not all(refused.values()):
        raise NotProven(f"the gateway refused {refused}")
    many = size.clients * len(ATTACKS)
    return [
        Figure("until the last of a kind is cut", max(took), "s", "lower", CUT_S,
               f"{len(ATTACKS)} kinds of {size.clients} clients, {size.pairs} times; {many} at once"),
        Figure("change of the others' p99 gap", statistics.median(changes), "%", "lower", 5.0,
               f"median of {size.pairs} pairs of windows: "
               + ", ".join(f"{change:+.1f} %" for change in changes)),
        Figure("memory of the router after each attack", max(grown) - min(grown), "MiB", "lower"),
        exactness(outcomes, "of the others"),
    ]  # fmt: skip


async def _window(
    trial: Trial, fleet: Fleet, size: Size, salt: int, attack: Attack | None = None
) -> tuple[list[Outcome], dict[str, float], float]:
    """Return the other clients' outcomes, the time until the last client of each attack was disconnected, and
    the p99 of the others' gaps."""
    work = asks(trial.rng(salt), 64, size.tokens)
    load = OpenLoop([fleet.address], work, size.rate, clock=trial.clock, rng=trial.rng(20 + salt))
    load.start()
    start = trial.clock.now()
    cuts: dict[str, float] = {}
    if attack is not None:
        cuts = await attack()
    await trial.clock.sleep(max(0.0, start + size.window_s - trial.clock.now()))
    outcomes = await load.stop()
    end = start + size.window_s
    gaps = [gap for outcome in outcomes for gap in outcome.gaps_s(start, end)]
    return outcomes, cuts, quantile(gaps, 0.99)


@asynccontextmanager
async def _attackers(address: str, clients: int) -> AsyncIterator[Attack]:
    """A process of attackers that is ready to begin. It is separate so that its CPU is not attributed to the
    gateway."""
    module = "load_tests.scenarios.scorecard.clients.attackers"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, address, str(clients), stdin=pipe, stdout=pipe
    )
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise AssertionError("a process with pipes has pipes")

    async def attack() -> dict[str, float]:
        stdin.write(b"go\n")
        reported = json.loads(await stdout.readline() or b'"the attackers ended before they were done"')
        if isinstance(reported, str):
            raise NotProven(reported)
        lasted: dict[str, float] = reported
        return lasted

    try:
        await stdout.readline()
        yield attack
    finally:
        stdin.close()
        await process.wait()
