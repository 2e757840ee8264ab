"""Snapshots run beside sessions: a few at a time, in parts that yield to other work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest

from kvasir.core.errors import ProtocolError
from kvasir.core.kv import KvSnapshotPart
from kvasir.ports.session import ConnectionLost
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_router.index import FetchSnapshot
from kvasir_router.requests.events import SnapshotEnded, SnapshotEvent, SnapshotPart
from kvasir_router.sessions.snapshots import MAX_AT_ONCE, Snapshots

PART = KvSnapshotPart(1, 0, b"", True)


class Source:
    """A worker whose parts come when the test says so."""

    def __init__(self, parts: int = 1, error: Exception | None = None) -> None:
        self.gate = asyncio.Event()
        self.parts = parts
        self.error = error
        self.open = False

    async def snapshot(self, epoch: int) -> AsyncGenerator[KvSnapshotPart, None]:
        self.open = True
        try:
            await self.gate.wait()
            for _ in range(self.parts):
                yield PART
            if self.error is not None:
                raise self.error
        finally:
            self.open = False


class Bench:
    def __init__(self) -> None:
        self.events: list[SnapshotEvent] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.snapshots = Snapshots(VirtualClock(), feed=self.events.append, spawn=self.spawn)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    def fetch(self, source: Source, number: int = 0, attempt: int = 1) -> None:
        self.snapshots.fetch(FetchSnapshot(f"w{number}", attempt, 0), source)

    async def settle(self) -> None:
        await VirtualClock().sleep(1.0)


def test_only_a_few_run_at_once_and_each_has_its_turn() -> None:
    async def story() -> None:
        bench, sources = Bench(), [Source() for _ in range(MAX_AT_ONCE + 3)]
        for number, source in enumerate(sources):
            bench.fetch(source, number)
        await bench.settle()
        assert [source.open for source in sources] == [True] * MAX_AT_ONCE + [False] * 3
        for source in sources:
            source.gate.set()
        await bench.settle()
        ended = [event.worker_id for event in bench.events if isinstance(event, SnapshotEnded)]
        assert sorted(ended) == [f"w{number}" for number in range(len(sources))]

    run_virtual(story())


@pytest.mark.parametrize(
    ("error", "final"),
    [(None, False), (ConnectionLost("cut"), False), (ProtocolError("no record"), True)],
    ids=["well", "cut", "refused"],
)
def test_parts_come_first_and_the_end_says_whether_to_ask_again(error: Exception | None, final: bool) -> None:
    async def story() -> None:
        bench, source = Bench(), Source(2, error)
        source.gate.set()
        bench.fetch(source, attempt=7)
        await bench.settle()
        reason = None if error is None else str(error)
        assert bench.events == [
            SnapshotPart("w0", 7, PART),
            SnapshotPart("w0", 7, PART),
            SnapshotEnded("w0", 7, reason, final),
        ]

    run_virtual(story())


def test_what_is_cancelled_says_nothing_more_and_lets_go_of_the_worker() -> None:
    async def story() -> None:
        bench, source = Bench(), Source()
        bench.fetch(source)
        await bench.settle()
        bench.snapshots.cancel("w0")
        bench.snapshots.cancel("w0")
        await bench.settle()
        assert (bench.events, source.open) == ([], False)

    run_virtual(story())


def test_a_new_attempt_takes_the_place_of_the_old_one() -> None:
    async def story() -> None:
        bench, old, new = Bench(), Source(), Source()
        new.gate.set()
        bench.fetch(old, attempt=1)
        await bench.settle()
        bench.fetch(new, attempt=2)
        await bench.settle()
        assert bench.events == [SnapshotPart("w0", 2, PART), SnapshotEnded("w0", 2)]
        assert not old.open

    run_virtual(story())


def test_others_have_their_turn_between_two_parts() -> None:
    async def story() -> None:
        bench, source = Bench(), Source(3)
        source.gate.set()
        bench.fetch(source)
        seen = []
        for _ in range(8):
            await VirtualClock().sleep(0)
            seen.append(len(bench.events))
        assert {1, 2, 3} <= set(seen)

    run_virtual(story())
