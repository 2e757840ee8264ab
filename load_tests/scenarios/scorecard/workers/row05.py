"""A partition of ten seconds: the worker is removed, rejoins, and its index is EXACT again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.kit.lab import netns
from tests.kit.lab.fleet import Fleet, LabWorker, Layout
from tests.kit.lab.gateway import until
from tests.kit.lab.load import OpenLoop, asks, tally

from load_tests.scenarios.scorecard.common import (
    Figure,
    NotProven,
    Trial,
    exactness,
    exercise,
    seen,
    split,
    usable,
)

PROMISE = "removed, rejoins, resyncs"


@dataclass(frozen=True, slots=True)
class Size:
    """One of `decode` workers is partitioned for `partition_s`."""

    decode: int = 4
    prefill: int = 2
    rate: float = 15.0
    tokens: int = 30
    before_s: float = 4.0
    partition_s: float = 10.0


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    missing = netns.available()
    place: Literal["namespace", "proxy"] = "namespace" if missing is None else "proxy"
    how = "link of a network namespace down" if missing is None else f"proxy stalled ({missing})"
    layout = Layout({"prefill": size.prefill, "decode": size.decode}, place={"decode": place})
    async with exercise(trial, split(), layout) as fleet:
        load = OpenLoop(
            [fleet.address], asks(trial.rng(1), 64, size.tokens), size.rate,
            clock=trial.clock, rng=trial.rng(2),
        )  # fmt: skip
        load.start()
        await trial.clock.sleep(size.before_s)
        victim = fleet.pool("decode")[0]

        async def holds_blocks() -> bool:
            return bool((await seen(fleet.address, victim))["kv"]["blocks"])

        # On a busy machine the first requests may not have been decoded yet.
        await until(holds_blocks, 30.0, f"{victim.name} holds blocks to resync", trial.clock)
        held = (await seen(fleet.address, victim))["kv"]["blocks"]
        await _cut(victim)

        async def out() -> bool:
            return not usable(await seen(fleet.address, victim))

        out_s = await until(out, 30.0, f"{victim.name} is out", trial.clock)
        trial.say(f"out after {out_s:.2f} s")
        await trial.clock.sleep(max(0.0, size.partition_s - out_s))
        before = await seen(fleet.address, victim)
        if usable(before) or not victim.running.alive:
            raise NotProven(f"{victim.name} was not cut off for {size.partition_s:g} s: {before['state']}")
        exact_s = await _heal(fleet, victim)
        trial.say(f"exact {exact_s:.2f} s after it healed")
        await trial.clock.sleep(2.0)
        outcomes = await load.stop()
    return [
        Figure("until the worker is out of use", out_s, "s", "lower", 3.0, how),
        Figure(
            "until it is ready and its cache EXACT, after healing", exact_s, "s", "lower", 5.0,
            f"it held {held} blocks",
        ),
        Figure("p99 of the longest gap", tally(outcomes).gap_p99_s, "s", "lower"),
        exactness(outcomes),
    ]  # fmt: skip


async def _cut(victim: LabWorker) -> None:
    if victim.namespace is not None:
        await victim.namespace.down()
    elif victim.proxy is not None:
        victim.proxy.stall()


async def _heal(fleet: Fleet, victim: LabWorker) -> float:
    if victim.namespace is not None:
        await victim.namespace.up()
    elif victim.proxy is not None:
        victim.proxy.resume()

    async def exact() -> bool:
        view = await seen(fleet.address, victim)
        return view["state"] == "ready" and bool(view["kv"]) and view["kv"]["state"] == "exact"

    return await until(exact, 60.0, f"{victim.name} is exact", fleet.clock)
