"""A deployment of the previous version is upgraded in place while streams run, in both orders: the processes
are real, those of the previous version run from an export of its sources, and each process is replaced by one
of this version.

The previous version is the one before the last change of the wire's messages.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest
from tests.kit.lab.fleet import Fleet, LabRouter, Layout
from tests.kit.lab.load import OpenLoop, asks
from tests.kit.lab.stream import Outcome

from kvasir.clock import MonotonicClock
from kvasir.config.load.loader import loads

pytestmark = [pytest.mark.slow, pytest.mark.soak]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("platform", "router", "workers")
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


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the previous version."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("the previous version is exported from the repository")
    changed = git("log", "-1", "--format=%H", "--", "proto").decode().strip()
    if not changed or not git("rev-parse", "--verify", "--quiet", f"{changed}^", check=False):
        pytest.skip("the repository has no previous version")
    folder = tmp_path_factory.mktemp("previous")
    export = folder / "sources.tar"
    export.write_bytes(git("archive", "--format=tar", f"{changed}^", *PACKAGES, "models"))
    subprocess.run(["tar", "-xf", str(export), "-C", str(folder)], check=True)
    export.unlink()
    for built in (ROOT / "platform/kvasir/native").glob("_native*.so"):
        shutil.copy(built, folder / "platform/kvasir/native")
    asked = [*of(folder), sys.executable, "-c", "import kvasir.wire as found; print(found.__file__)"]
    found = subprocess.run(asked, check=True, stdout=subprocess.PIPE).stdout.decode()
    assert found.startswith(str(folder)), "processes of the previous version would run this one"
    return folder


def git(*arguments: str, check: bool = True) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=check, stdout=subprocess.PIPE).stdout


def of(version: Path) -> list[str]:
    """What begins the command of a process of that version."""
    path = os.pathsep.join(str(version / package) for package in PACKAGES)
    return ["env", f"PYTHONPATH={path}"]


async def replace_workers(fleet: Fleet, _routers: list[LabRouter]) -> None:
    """One by one, each after its streams have ended or moved."""
    for worker in fleet.workers:
        await fleet.stop_worker(worker, GRACE_S)
        worker.command = [*of(ROOT), *worker.command[2:]]
        await fleet.start_worker(worker)
        for router in fleet.routers:
            if router.process.alive:
                await fleet.all_ready(router)


async def replace_routers(fleet: Fleet, routers: list[LabRouter]) -> None:
    """One by one: the next takes the requests, and the last answers what it has."""
    for old in list(routers):
        fleet.prefix = of(ROOT)
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
    tmp_path: Path, previous: Path, steps: tuple[Steps, Steps]
) -> None:
    clock = MonotonicClock()
    fleet = Fleet(tmp_path, loads(SPEC, "kvasir.yaml"), Layout({"prefill": 1, "decode": 2}, 2), clock=clock)
    fleet.prefix = of(previous)
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
