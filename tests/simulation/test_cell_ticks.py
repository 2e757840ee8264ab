"""Steps of keeping the links between cells that fail or have much to do, in virtual time: the links stay, and
what runs on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.kit.sim.cells import SimCell, SimCells
from tests.simulation.test_cell_losses import LONG, begun, played, served_by, without_workers

from kvasir_platform.regions import dispatch as dispatching
from kvasir_platform.regions.session import CellSession
from kvasir_platform.sim.client import ClientStream


def fail() -> None:
    raise RuntimeError("a fault of our own")


def failing(home: SimCell, step: str) -> tuple[Any, str]:
    """Where a step of the cell's tick is called, and its name."""
    router = home.router
    return {
        "peer": (router._peers["us"], "tick"),
        "requests": (router._dispatch, "leave_home"),
        "limits": (router._limits, "tick"),
    }[step]


def failures(cell: SimCell) -> int:
    return cell.router.cells()[0].failures


@pytest.mark.parametrize("step", ["peer", "requests", "limits"])
def test_links_and_streams_outlast_a_step_that_fails(step: str, caplog: pytest.LogCaptureFixture) -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        await without_workers(home)
        streams = await begun(cells, home, 3)
        assert failures(home) == 0
        owner, name = failing(home, step)
        setattr(owner, name, fail)
        await cells.clock.sleep(3.0)
        assert failures(home) >= 3
        delattr(owner, name)
        await asyncio.gather(*(stream.finished() for stream in streams))
        assert {served_by(stream) for stream in streams} == {"us"}
        assert all(stream.summary.migrations == 0 for stream in streams if stream.summary)
        assert [view.state for view in home.router.cells()] == ["here", "fresh", "fresh"]
        return streams

    played(story)
    logged = [record for record in caplog.records if "keeping the links" in record.message]
    assert 1 <= len(logged) <= 5
    assert "a fault of our own" in caplog.text


def session_of(cell: SimCell, origin: str) -> CellSession:
    sessions = cell.router._serving._sessions
    (found,) = (each for each in sessions if each._hello is not None and each._hello.cell == origin)
    return found


def test_a_session_whose_tick_fails_ends_alone_and_nothing_of_it_runs_twice() -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home, us = cells["eu"], cells["us"]
        await without_workers(home)
        streams = await begun(cells, home, 3)
        other = session_of(us, "ap")
        session_of(us, "eu").tick = fail  # type: ignore[method-assign]
        await asyncio.gather(*(stream.finished() for stream in streams))
        assert {served_by(stream) for stream in streams} == {"ap"}
        assert failures(us) == 1
        assert session_of(us, "ap") is other
        await cells.clock.sleep(10.0)
        assert {view.state for view in home.router.cells()[1:]} == {"fresh"}
        return streams

    played(story)


def test_a_cell_that_can_make_no_report_keeps_what_it_runs() -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home, us = cells["eu"], cells["us"]
        await without_workers(home)
        streams = await begun(cells, home, 3)
        object.__setattr__(us.router._serving._parts, "report", fail)
        await cells.clock.sleep(4.5)
        assert {view.cell: view.state for view in home.router.cells()}["us"] != "fresh"
        new = home.submit("new", range(32), LONG)
        await asyncio.gather(*(stream.finished() for stream in (*streams, new)))
        assert {served_by(stream) for stream in streams} == {"us"}
        assert served_by(new) == "ap"
        return [*streams, new]

    played(story)


def counted(owner: Any, name: str, counts: list[int]) -> None:
    """Count the calls of a method in the last of `counts`."""
    inner: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any, **named: Any) -> Any:
        counts[-1] += 1
        return inner(*args, **named)

    setattr(owner, name, call)


def test_requests_that_wait_for_workers_are_judged_once_for_all_alike_and_leave_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatching, "MOST_LEAVING", 16)

    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        dispatch = home.router._dispatch
        for worker_id in list(home.cluster.workers):
            await home.cluster.kill(worker_id)
        staying = [home.submit(f"s{i}", range(i, 32 + i), tenant="bank") for i in range(30)]
        leaving = [home.submit(f"l{i}", range(i, 32 + i), tenant="shop") for i in range(24)]
        judged, left = [0], [0]
        counted(dispatch, "_choice", judged)
        counted(dispatch, "_start_later", left)
        step = dispatch.leave_home

        def leave_home() -> None:
            step()
            judged.append(0)
            left.append(0)

        dispatch.leave_home = leave_home  # type: ignore[method-assign]
        while sum(left) < len(leaving):
            await cells.clock.sleep(0.05)
        assert max(left) == 16
        await asyncio.gather(*(stream.finished() for stream in leaving))
        await cells.clock.sleep(0.5)
        assert all(not stream.started.is_set() for stream in staying)
        assert judged[-3:-1] == [1, 1]
        for stream in staying:
            home.router.cancel(stream.request.request_id)
        return leaving

    played(story, residency={"bank": ("eu",)})
