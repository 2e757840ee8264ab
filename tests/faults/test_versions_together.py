"""Processes of the previous version serve beside processes of this one: an old router with new workers, and
the reverse. A worker of an incompatible version is refused by name.

The processes are real. Those of the previous version run from an export of its sources, without compiled
modules. `test_upgrade_in_place.py` replaces each process of a deployment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from shutil import copytree

import psutil
import pytest
from tests.kit.lab.fleet import Fleet, Layout, Place
from tests.kit.lab.gateway import until, workers
from tests.kit.lab.load import asks, closed_loop
from tests.kit.lab.proxy import UPSTREAM, Direction
from tests.kit.lab.stream import Ask
from tests.kit.suite.versions import THIS, Version

from kvasir.clock import MonotonicClock
from kvasir.config.load.loader import loads
from kvasir.core.identity import PROTOCOL_VERSION

pytestmark = pytest.mark.slow

NAMED = "patient-class"
SPEC = f"""
name: together
pools:
  - {{name: prefill, role: prefill, engine: {{kind: sim}}}}
  - {{name: decode, role: decode, engine: {{kind: sim}}}}
slo:
  - {{name: default, ttft_s: 30, itl_s: 1}}
  - {{name: {NAMED}, ttft_s: 60, itl_s: 2}}
"""
TRACED = ("traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", f"x-kvasir-slo: {NAMED}")
STREAMS, TOKENS = 12, 60
PATIENCE_S = 30.0


@asynccontextmanager
async def workers_of(folder: Path, version: Version) -> AsyncIterator[Fleet]:
    """Workers for both legs behind proxies, no router, and the address of a worker that is not started."""
    place: dict[str, Place] = {"prefill": "proxy", "decode": "proxy"}
    layout = Layout({"prefill": 1, "decode": 1}, routers=0, reserved={"decode": 1}, place=place)
    made = Fleet(folder, loads(SPEC, "kvasir.yaml"), layout, clock=MonotonicClock())
    made.prefix = version.prefix
    async with made:
        yield made


def prompts() -> Iterator[Ask]:
    return asks(Random(1), 48, TOKENS)


async def assert_exact(fleet: Fleet, work: Sequence[Ask]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        outcomes = await closed_loop(fleet.address, work, STREAMS, fleet.clock)
    assert len(outcomes) == len(work)
    assert [f"{each.error or each.finish} {each.detail}" for each in outcomes if not each.exact] == []


def test_the_previous_version_has_other_messages(previous: Version) -> None:
    before, now = previous.wire(), THIS.wire()
    assert before.keys() & now.keys()
    assert before != now


@pytest.mark.parametrize("old", ["router", "workers"])
async def test_every_token_arrives_once_between_two_versions(
    tmp_path: Path, previous: Version, old: str
) -> None:
    of_router, of_workers = (previous, THIS) if old == "router" else (THIS, previous)
    async with workers_of(tmp_path, of_workers) as fleet:
        fleet.prefix = of_router.prefix
        await fleet.all_ready(await fleet.add_router())
        for name, pid in fleet.pids().items():
            its = of_router if name.startswith("router") else of_workers
            assert psutil.Process(pid).environ()["PYTHONPATH"] == its.path
        sent = bytearray()

        def heard(direction: Direction, data: bytes) -> None:
            if direction == UPSTREAM:
                sent.extend(data)

        for worker in fleet.workers:
            if worker.proxy is not None:
                worker.proxy.heard = heard
        work = prompts()
        plain = [next(work) for _ in range(STREAMS)]
        traced = [replace(next(work), headers=TRACED) for _ in range(STREAMS)]
        await assert_exact(fleet, plain + traced)
        # A router names the class of a traced leg in a field that its workers may not know.
        assert (NAMED.encode() in sent) == ("slo" in of_router.fields("EngineRequest"))


async def test_a_worker_of_an_incompatible_version_is_refused_by_name_and_streams_go_on(
    tmp_path: Path, previous: Version
) -> None:
    other = Version(tmp_path / "incompatible")
    copytree(previous.root, other.root)
    source = other.root / "platform/kvasir/core/identity.py"
    text, declared = source.read_text(), "PROTOCOL_VERSION = {}\n"
    assert text.count(declared.format(PROTOCOL_VERSION)) == 1
    source.write_text(text.replace(declared.format(PROTOCOL_VERSION), declared.format(PROTOCOL_VERSION + 1)))
    async with workers_of(tmp_path, THIS) as fleet:
        stranger = fleet.workers[-1]
        stranger.command = [*other.prefix, *stranger.command[len(THIS.prefix) :]]
        await fleet.start_worker(stranger)
        router = await fleet.add_router()

        async def settled() -> bool:
            seen = await workers(router.address)
            return sorted(each["state"] for each in seen.values()) == ["ready", "ready", "refused"]

        await until(settled, PATIENCE_S, "one worker is refused and two are ready", fleet.clock, 0.05)
        view = (await workers(router.address))[stranger.address]
        versions = f"protocol_version: {PROTOCOL_VERSION} != {PROTOCOL_VERSION + 1}"
        assert view["state"] == "refused"
        assert versions in view["reason"]
        await assert_exact(fleet, list(islice(prompts(), STREAMS)))
