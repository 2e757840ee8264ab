"""A hanging engine is distinguished from one that works, waits or is idle."""

from __future__ import annotations

from array import array

import pytest
from tests.kit.clocks import StillClock
from tests.kit.engines.stub_engine import IDENTITY, StubEngine

from kvasir.core.requests import Delta, EngineLoad, EngineRequest, FinishReason, Sampling, StepBatch
from kvasir_workers.pool.progress import STUCK_S, WatchedEngine


class Stage:
    def __init__(self) -> None:
        self.engine, self.clock = StubEngine(), StillClock(1000.0)
        self.seen: list[StepBatch] = []
        self.watched = WatchedEngine(self.engine, self.clock)

    def after(self, seconds: float) -> str | None:
        """What is said of it this much later, asked about every second meanwhile."""
        end = self.clock.at + seconds
        found = None
        while self.clock.at < end:
            self.clock.at += 1.0
            found = self.watched.stuck()
        return found


@pytest.fixture
async def stage() -> Stage:
    made = Stage()
    assert await made.watched.start(made.seen.append, worker_id="w", epoch=1) is IDENTITY
    made.watched.stuck()
    return made


def request(name: str) -> EngineRequest:
    return EngineRequest(request_id=name, tokens=array("I", (1, 2, 3)), sampling=Sampling(max_tokens=4))


async def test_an_engine_with_requests_that_does_nothing_is_stuck(stage: Stage) -> None:
    stage.watched.submit([request("a"), request("b")])
    assert stage.after(STUCK_S - 2) is None
    assert stage.after(3) == "the engine has made no progress for 61 s, with 2 requests live"


async def test_an_idle_engine_is_not_stuck_however_long(stage: Stage) -> None:
    assert stage.after(10 * STUCK_S) is None
    stage.watched.submit([request("a")])
    assert stage.after(STUCK_S - 2) is None


async def test_steps_that_deliver_are_progress(stage: Stage) -> None:
    stage.watched.submit([request("a")])
    for offset in range(5):
        stage.engine.say(Delta(request_id="a", offset=offset, token_ids=(1,), text="x"))
        assert stage.after(STUCK_S - 2) is None
    assert len(stage.seen) == 5


async def test_a_load_that_changes_is_progress(stage: Stage) -> None:
    stage.watched.submit([request("a")])
    for chunk in range(5):
        stage.engine.newest = EngineLoad(running=1, kv_usage=0.1 * (chunk + 1))
        assert stage.after(STUCK_S - 2) is None
    assert stage.after(10) is not None


async def test_with_its_last_request_ended_it_is_idle_again(stage: Stage) -> None:
    stage.watched.submit([request("a")])
    stage.engine.say(Delta(request_id="a", offset=0, finish=FinishReason.LENGTH, last=True))
    stage.engine.newest = EngineLoad(running=1)  # an engine may report the load of its last step for ever
    assert stage.after(10 * STUCK_S) is None
