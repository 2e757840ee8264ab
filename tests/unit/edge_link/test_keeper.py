"""The core's edges: started together, monitored, restarted, and stopped together."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import psutil
import pytest
from tests.kit.gateway import fake_edge
from tests.kit.gateway.edge_link import core_parts
from tests.kit.gateway.scripted_router import ScriptedRouter
from tests.kit.processes import command_line

from kvasir.clock import MonotonicClock
from kvasir.core.errors import KvasirError, StartError
from kvasir_platform.edge import supervisor as keeper_module
from kvasir_platform.edge.frames import EdgeWelcome
from kvasir_platform.edge.supervisor import EdgeSupervisor, RestartLimits

pytestmark = pytest.mark.slow

COMMAND = (sys.executable, str(fake_edge.__file__))
PATIENCE_S = 60.0


@asynccontextmanager
async def kept(manner: bytes, count: int = 2, silent_beats: int = 30) -> AsyncIterator[EdgeSupervisor]:
    """Edges of one manner that end with the block."""
    keeper = EdgeSupervisor(
        count,
        core_parts(ScriptedRouter(MonotonicClock())),
        COMMAND,
        EdgeWelcome(manner, [("127.0.0.1", 4711)]),
        clock=MonotonicClock(),
        patience=RestartLimits(pause_s=0.05, silent_beats=silent_beats),
    )
    try:
        yield keeper
    finally:
        await keeper.close()
    assert children() == []


def children() -> list[psutil.Process]:
    """The edges of this process that live."""
    return [each for each in psutil.Process().children() if "--link-fd" in command_line(each).split()]


def others_run(before: set[int]) -> bool:
    """Whether there are two again, and not the same."""
    now = {process.pid for process in children()}
    return len(now) == 2 and now != before


async def until(condition: Callable[[], bool]) -> None:
    """Wait for other processes."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


async def test_all_edges_listen_when_the_start_is_over_and_end_in_good_order_when_told() -> None:
    async with kept(b"serve", count=3) as keeper:
        assert await keeper.start() == ("127.0.0.1", 4711)
        assert len(children()) == 3
        await keeper.drain(PATIENCE_S)
        assert children() == []


async def test_an_edge_that_ends_is_replaced_every_time() -> None:
    async with kept(b"serve") as keeper:
        await keeper.start()
        for _ in range(2):
            before = {process.pid for process in children()}
            os.kill(min(before), signal.SIGKILL)
            await until(partial(others_run, before))
            await until(lambda: all(edge.listens for edge in keeper.edges))


async def test_an_edge_that_says_nothing_any_more_is_killed_and_replaced() -> None:
    async with kept(b"deaf", count=1, silent_beats=1) as keeper:
        await keeper.start()
        (first,) = children()
        await until(lambda: not first.is_running() and len(children()) == 1)


async def test_why_an_edge_cannot_start_is_told_and_no_other_edge_stays() -> None:
    async with kept(b"refuse") as keeper:
        with pytest.raises(KvasirError, match="no certificate") as refused:
            await keeper.start()
        assert refused.value.code == "config_error"


async def test_an_edge_that_dies_before_it_listens_is_an_error_of_the_start() -> None:
    async with kept(b"die") as keeper:
        with pytest.raises(StartError, match="status -9 before it listened"):
            await keeper.start()


async def test_a_fault_of_the_keeping_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kept(b"serve", count=1) as keeper:
        await keeper.start()

        def fail(_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(keeper_module, "core_status_of", fail)
        async with asyncio.timeout(PATIENCE_S):
            await keeper.broken.wait()


async def test_a_start_that_is_given_up_leaves_nothing() -> None:
    async with kept(b"serve") as keeper:
        starting = asyncio.create_task(keeper.start())
        await asyncio.sleep(0)
        starting.cancel()
        await keeper.drain(PATIENCE_S)
    assert not keeper.broken.is_set()


async def test_a_command_that_cannot_be_run_is_an_error_of_the_start() -> None:
    keeper = EdgeSupervisor(
        1,
        core_parts(ScriptedRouter(MonotonicClock())),
        ("/no/such/program",),
        EdgeWelcome(b"", []),
        clock=MonotonicClock(),
    )
    with pytest.raises(StartError, match="cannot be started"):
        await keeper.start()
    await keeper.close()


async def test_an_edge_that_does_not_come_up_in_time_is_an_error_of_the_start() -> None:
    keeper = EdgeSupervisor(
        1,
        core_parts(ScriptedRouter(MonotonicClock())),
        (sys.executable, "-c", "import time; time.sleep(600)"),
        EdgeWelcome(b"", []),
        clock=MonotonicClock(),
        patience=RestartLimits(start_s=0.5),
    )
    with pytest.raises(StartError, match="before it listened"):
        await keeper.start()
    await keeper.close()
