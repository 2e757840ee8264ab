"""A deployment of the previous version is upgraded in place while streams run, in both orders: the processes
are real, those of the previous version run from an export of its sources, and each process is replaced by one
of this version.

The previous version is the newest one with other messages. `test_versions_together.py` has two versions side
by side in every run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest
from tests.kit.lab.fleet import Fleet, LabRouter, Layout
from tests.kit.lab.load import OpenLoop, asks
from tests.kit.lab.stream import Outcome
from tests.kit.suite.versions import THIS, Version

from kvasir.clock import MonotonicClock
from kvasir.config.load.loader import loads

pytestmark = [pytest.mark.slow, pytest.mark.soak]

SPEC = """
name: upgraded
pools:
  - {name: prefill, role: prefill, engine: {kind: sim}}
  - {name: decode, role: decode, engine: {kind: sim}}
gateway: {drain_timeout_s: 30}
worker: {drain_s: 30}
"""
GRACE_S = 60.0
Steps = Callable[[Fleet, list[LabRouter]], Awaitable[None]]


async def replace_workers(fleet: Fleet, _routers: list[LabRouter]) -> None:
    """One by one, each after its streams have ended or moved."""
    for worker in fleet.workers:
        await fleet.stop_worker(worker, GRACE_S)
        worker.command = [*THIS.prefix, *worker.command[len(THIS.prefix) :]]
        await fleet.start_worker(worker)
        for router in fleet.routers:
            if router.process.alive:
                await fleet.all_ready(router)


async def replace_routers(fleet: Fleet, routers: list[LabRouter]) -> None:
    """One by one: the next takes the requests, and the last answers what it has."""
    for old in list(routers):
        fleet.prefix = THIS.prefix
        new = await fleet.add_router()
        await fleet.all_ready(new)
        routers[routers.index(old)] = new
        await old.process.terminate(GRACE_S)


class Addresses(list[str]):
    """Those of the routers that take requests, as a load balancer has them."""

    def __init__(self, routers: list[LabRouter]) -> None:
        super().__init__()
        self._routers = routers

    def __len__(self) -> int:
        return len(self._routers)

    def __getitem__(self, turn: object) -> str:  # type: ignore[override]
        assert isinstance(turn, int)
        return self._routers[turn].address


@pytest.mark.parametrize(
    "steps",
    [(replace_workers, replace_routers), (replace_routers, replace_workers)],
    ids=["workers first", "routers first"],
)
async def test_streams_outlive_an_upgrade_from_the_previous_version(
    tmp_path: Path, previous: Version, steps: tuple[Steps, Steps]
) -> None:
    clock = MonotonicClock()
    fleet = Fleet(tmp_path, loads(SPEC, "kvasir.yaml"), Layout({"prefill": 1, "decode": 2}, 2), clock=clock)
    fleet.prefix = previous.prefix
    async with fleet:
        routers = list(fleet.routers)
        load = OpenLoop(Addresses(routers), asks(Random(1), 48, 120), 6.0, clock=clock, rng=Random(2))
        load.start()
        await served(load, 5)
        for step in steps:
            await step(fleet, routers)
            await served(load, len(load.outcomes) + 10)
        outcomes = await load.stop(GRACE_S)
    assert len(outcomes) > 30
    assert [wrong(each) for each in outcomes if not each.exact] == []


async def served(load: OpenLoop, count: int) -> None:
    """Wait until so many streams have ended."""
    async with asyncio.timeout(GRACE_S):
        while len(load.outcomes) < count:
            await asyncio.sleep(0.05)


def wrong(outcome: Outcome) -> str:
    return f"{outcome.error or outcome.finish} {outcome.detail} after {len(outcome.times_s)} chunks"
