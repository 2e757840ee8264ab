"""Losses of nodes: a network that is cut while the node's processes live, a node that comes back when its
replicas have been replaced, and a drain of the node with the only decode replica.

A node is a network namespace, whose link goes down like a cable. Processes are the product's own, engines
simulated.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tests.kit.lab.fleet import Fleet, LabWorker, Layout
from tests.kit.lab.gateway import until
from tests.kit.lab.netns import Namespace

from kvasir.config.spec.deployment import WorkerSpec
from load_tests.scenarios.cluster.losses import Load, busy, judged, under_load
from load_tests.scenarios.scorecard.common import (
    Figure,
    NotProven,
    Trial,
    exercise,
    migrations,
    seen,
    split,
    usable,
)

RESUME_WINDOW_S = 10.0
"""The default of worker.resume_window_s: how long a worker keeps a session that has lost its router."""
EXIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Cut:
    """One of `decode` nodes is cut off for `cut_s` seconds. `replaced`: another node takes its place before
    it returns."""

    decode: int = 2
    cut_s: float = 6.0
    replaced: bool = False
    load: Load = Load()


async def cut_off(trial: Trial, size: Cut) -> list[Figure]:
    """A decode node's network is cut and comes back; its processes live all the time."""
    layout = Layout(
        {"prefill": 1, "decode": size.decode},
        reserved={"decode": 1} if size.replaced else {},
        place={"decode": "namespace"},
    )
    async with exercise(trial, split(), layout, rest_s=RESUME_WINDOW_S + 10.0) as fleet:
        victim = fleet.pool("decode")[0]
        link = _link(victim)
        async with under_load(trial, [fleet.address], size.load) as outcomes:
            running = await busy(fleet, victim)
            began = trial.clock.now()
            await link.down()
            out_s = await _until_usable(fleet, victim, False)
            if size.replaced:
                await fleet.start_worker(fleet.workers[-1])
                await until(
                    lambda: _serves(fleet, fleet.workers[-1]), 30.0, "a replacement", fleet.clock, 0.05
                )
            await trial.clock.sleep(began + size.cut_s - trial.clock.now())
            await _still_cut(fleet, victim, link)
            cut_s = trial.clock.now() - began
            await link.up()
            back_s = await _until_usable(fleet, victim, True)
            # Streams of the time before the cut that its engine went on with would show here.
            await busy(fleet, victim)
        moved = await migrations(fleet)
    if moved < running:
        raise NotProven(f"{running} streams ran on the node, and {moved:g} failed over")
    note = (
        f"{running} streams ran on the node that was cut off for {cut_s:.1f} s, {moved:g} failed over; "
        f"out of use after {out_s:.1f} s, in use {back_s:.1f} s after its return"
    )
    return judged(outcomes, note)


@dataclass(frozen=True, slots=True)
class Drained:
    """The only decode replica is drained within `drain_s`, and a successor serves `away_s` seconds later."""

    drain_s: float = 1.0
    away_s: float = 2.5
    load: Load = Load()


async def drained(trial: Trial, size: Drained) -> list[Figure]:
    """`kubectl drain` of the node with the only decode replica: SIGTERM, and a successor on another node."""
    layout = Layout({"prefill": 1, "decode": 1}, reserved={"decode": 1})
    deployment = split(worker=WorkerSpec(drain_s=size.drain_s))
    async with exercise(trial, deployment, layout) as fleet:
        (only,) = fleet.pool("decode")
        async with under_load(trial, [fleet.address], size.load) as outcomes:
            running = await busy(fleet, only)
            await fleet.stop_worker(only, size.drain_s + EXIT_S)
            if fleet.pool("decode"):
                raise NotProven("another decode replica serves")
            await trial.clock.sleep(size.away_s)
            await fleet.start_worker(fleet.workers[-1])
            await fleet.all_ready()
            await busy(fleet, fleet.workers[-1])
        moved = await migrations(fleet)
    return judged(
        outcomes,
        f"{running} streams ran on it at SIGTERM, {moved:g} failed over; no decode replica for "
        f"{size.away_s:g} s and more",
    )


def _link(worker: LabWorker) -> Namespace:
    if worker.namespace is None:
        raise NotProven(f"{worker.name} has no network of its own")
    return worker.namespace


async def _until_usable(fleet: Fleet, worker: LabWorker, wanted: bool) -> float:
    async def reached() -> bool:
        return usable(await seen(fleet.address, worker)) is wanted

    return await until(reached, 60.0, f"{worker.name} usable: {wanted}", fleet.clock, 0.02)


async def _serves(fleet: Fleet, worker: LabWorker) -> bool:
    return usable(await seen(fleet.address, worker))


async def _still_cut(fleet: Fleet, worker: LabWorker, link: Namespace) -> None:
    up, view = await asyncio.gather(link.is_up(), seen(fleet.address, worker))
    if up or not worker.running.alive or usable(view):
        raise NotProven(f"{worker.name} was not cut off: link up {up}, {view['state']}")
