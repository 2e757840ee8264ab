"""Slow and oversized requests: each is disconnected, and other clients are not affected.

They are compared with as many connections that are idle, which any gateway has.
"""

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

from kvasir.config.spec.deployment import GatewaySpec
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
    windows with as many idle connections and with the attacks."""

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
        router = fleet.routers[0].process.pid
        for pair in range(size.pairs):
            async with _attackers(fleet.address, size.clients, "idle") as hold:
                calm = await _window(trial, fleet, size, 2 * pair, hold)
            before = resident_bytes(router)
            async with _attackers(fleet.address, size.clients) as attack:
                under = await _window(trial, fleet, size, 2 * pair + 1, attack)
            outcomes += [*calm.outcomes, *under.outcomes]
            changes.append((under.gap_s / calm.gap_s - 1.0) * 100)
            took += under.cuts.values()
            grown.append((under.peak - before) / 2**20)
            trial.say(
                f"p99 of gaps {calm.gap_s * 1e3:.1f} ms beside idle connections, {under.gap_s * 1e3:.1f} ms "
                f"under attack; router {before / 2**20:.0f} to {under.peak / 2**20:.0f} MiB; cut after "
                + ", ".join(f"{seconds:.1f} s ({name})" for name, seconds in under.cuts.items())
            )
        left = (resident_bytes(router) - before) / 2**20
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
        Figure("growth of the router's memory under attack", max(grown), "MiB", "lower",
               GatewaySpec().max_bodies_bytes / 2**20, "at its peak; the bound is max_bodies_bytes, of "
               f"bodies that are received; {left:.0f} MiB are left of it after the last attack"),
        exactness(outcomes, "of the others"),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Window:
    """The other clients' outcomes and the p99 of their gaps; the time until the last client of each attack
    was disconnected; the most resident bytes of the router."""

    outcomes: list[Outcome]
    gap_s: float
    cuts: dict[str, float]
    peak: int


async def _window(trial: Trial, fleet: Fleet, size: Size, salt: int, attack: Attack) -> _Window:
    """Run the other clients beside an attack, or beside connections that are held."""
    work = asks(trial.rng(salt), 64, size.tokens)
    load = OpenLoop([fleet.address], work, size.rate, clock=trial.clock, rng=trial.rng(20 + salt))
    load.start()
    start = trial.clock.now()
    end = start + size.window_s
    attacking = asyncio.ensure_future(attack())
    peak = 0
    while trial.clock.now() < end or not attacking.done():
        peak = max(peak, resident_bytes(fleet.routers[0].process.pid))
        await trial.clock.sleep(0.05)
    cuts = await attacking
    outcomes = await load.stop()
    gaps = [gap for outcome in outcomes for gap in outcome.gaps_s(start, end)]
    return _Window(outcomes, quantile(gaps, 0.99), cuts, peak)


@asynccontextmanager
async def _attackers(address: str, clients: int, *how: str) -> AsyncIterator[Attack]:
    """A process of attackers that is ready to begin, or of idle connections. It is separate so that
    its CPU is not attributed to the gateway."""
    module = "load_tests.scenarios.scorecard.clients.attackers"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, address, str(clients), *how, stdin=pipe, stdout=pipe
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
