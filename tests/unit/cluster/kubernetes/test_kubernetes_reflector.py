"""Where a copy of a collection resumes after each way in which a watch can end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from tests.kit.skipping_clock import SkippingClock

from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.api import GONE, ApiError, ApiServer, Event, Listing
from kvasir_platform.cluster.kubernetes.reflector import BACKOFF_MAX_S, WATCH_S, Reflector

RESYNC_S = 300.0
Script = Sequence[Event | ApiError | float]
"""What a watch tells, how it fails, and how many seconds it takes on the way."""


BROKEN = ApiError("the connection broke off")


class Scripted(ApiServer):
    """Lists `version` 5 and tells of watches what the scripts say; after the last one, nothing for ever."""

    def __init__(self, clock: SkippingClock, *watches: Script) -> None:
        super().__init__(Access("h", 1, Path("/nowhere")), timeout_s=1.0)
        self.calls: list[str] = []
        self.times: list[float] = []
        self.done = asyncio.Event()
        self._clock = clock
        self._watches = list(watches)
        self.fails_to_list: set[int] = set()

    async def list(self, collection: str, params: Mapping[str, str]) -> Listing:
        self.calls.append("list")
        if self.calls.count("list") in self.fails_to_list:
            raise BROKEN
        return Listing("5", {"a": b"1"})

    async def watch(
        self, collection: str, params: Mapping[str, str], version: str, for_s: float
    ) -> AsyncGenerator[Event, None]:
        self.calls.append(f"watch from {version}")
        self.times.append(for_s)
        if not self._watches:
            self.done.set()
            await asyncio.Event().wait()
        for step in self._watches.pop(0):
            if isinstance(step, ApiError):
                raise step
            if isinstance(step, float):
                self._clock.skip(step)
            else:
                yield step


async def follow(
    *watches: Script, fails_to_list: Iterable[int] = ()
) -> tuple[Scripted, SkippingClock, list[dict[str, bytes]]]:
    clock = SkippingClock()
    api, taken = Scripted(clock, *watches), list[dict[str, bytes]]()
    api.fails_to_list |= set(fails_to_list)

    def take(objects: Mapping[str, bytes]) -> float:
        taken.append(dict(objects))
        return 0.0

    reflector = Reflector(api, "/things", {}, clock=clock, rng=random.Random(3), resync_s=RESYNC_S, take=take)
    async with asyncio.timeout(20):
        running = asyncio.create_task(reflector.run())
        await api.done.wait()
        running.cancel()
        await asyncio.wait({running})
    return api, clock, taken


async def test_a_bookmark_is_where_an_interrupted_watch_goes_on() -> None:
    api, _, taken = await follow([Event("BOOKMARK", "", "9", b"{}"), BROKEN])
    assert api.calls == ["list", "watch from 5", "watch from 9"]
    assert taken == [{"a": b"1"}]


async def test_a_watch_that_ends_in_good_order_goes_on_at_once() -> None:
    api, clock, taken = await follow([Event("ADDED", "b", "6", b"2"), 60.0], [60.0])
    assert api.calls == ["list", "watch from 5", "watch from 6", "watch from 6"]
    assert clock.slept == []
    assert taken[-1] == {"a": b"1", "b": b"2"}


async def test_a_watch_that_ends_at_once_and_told_nothing_is_not_begun_again_at_once() -> None:
    api, clock, _ = await follow([], [], [])
    assert api.calls == ["list"] + 4 * ["watch from 5"]
    assert len(clock.slept) == 3


async def test_a_version_that_is_gone_is_listed_anew_and_the_same_objects_are_told() -> None:
    api, clock, taken = await follow([ApiError("too old", status=GONE)])
    assert api.calls == ["list", "watch from 5", "list", "watch from 5"]
    assert clock.slept == [0.0]
    assert taken == 2 * [{"a": b"1"}]


async def test_success_makes_the_next_wait_short_again() -> None:
    _, clock, _ = await follow([BROKEN], [BROKEN], [BROKEN], [Event("BOOKMARK", "", "9", b"{}"), BROKEN])
    first, *_, last = clock.slept
    assert last == pytest.approx(first, rel=0.5)
    assert max(clock.slept) > 2 * last


async def test_everything_is_listed_again_after_the_resync_time() -> None:
    api, _, _ = await follow([100.0], [100.0], [100.0])
    assert api.calls == ["list", *3 * ["watch from 5"], "list", "watch from 5"]
    assert all(WATCH_S / 2 <= each <= WATCH_S for each in api.times[:2])
    assert api.times[2] <= RESYNC_S - 200


async def test_while_a_resync_fails_changes_are_watched_for_all_the_same() -> None:
    added = Event("ADDED", "b", "6", b"2")
    api, _, taken = await follow([350.0], [added, BROKEN], [BROKEN], fails_to_list=(2, 3))
    assert api.calls == [
        *("list", "watch from 5"),
        *("list", "watch from 5"),
        *("list", "watch from 6"),
        *("list", "watch from 5"),
    ]
    assert taken[1] == {"a": b"1", "b": b"2"}
    assert min(api.times) >= BACKOFF_MAX_S / 2


async def test_an_event_that_changes_nothing_is_not_told() -> None:
    _, _, taken = await follow([Event("MODIFIED", "a", "6", b"1"), 60.0])
    assert taken == [{"a": b"1"}]
