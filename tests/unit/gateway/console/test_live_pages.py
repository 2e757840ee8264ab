"""The console's stream: each page once a second for all viewers, bounded in number and time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.kit.gateway.api_answers import RecordingWire, exchange_on, received

from kvasir.core.errors import CapacityError, RequestError
from kvasir_platform.gateway.console.live_pages import (
    EVERY_S,
    MOST_EVERY_S,
    MOST_SHARE,
    MOST_VIEWERS,
    STREAM_S,
    LivePages,
)
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual

WINDOW_S = 3.25 * EVERY_S


@dataclass
class Stage:
    """A stream of two pages: `status` says how often it was rendered, each time for `cost_s` of CPU, and
    `requests` fails."""

    rendered: int = 0
    cost_s: float = 0.0
    draining: bool = False
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        pages = {"/status": self._status, "/requests": self._requests}
        self.live = LivePages(
            pages, self.clock.now, lambda: self.rendered * self.cost_s, lambda: self.draining
        )

    def _status(self, exchange: Exchange) -> None:
        self.rendered += 1
        exchange.respond(200, b'{\n"rendered":%d}' % self.rendered)

    def _requests(self, exchange: Exchange) -> None:
        raise CapacityError("no core", code="shutting_down")

    def look(self, query: bytes = b"") -> RecordingWire:
        wire = RecordingWire()
        self.live.serve(exchange_on(wire, query=query))
        return wire


def events(wire: RecordingWire) -> list[str]:
    """What a viewer got, the stream's end included if there is one."""
    whole = wire.sent if wire.closed is not None else wire.sent + b"0\r\n\r\n"
    return received(whole).body.decode().split("\n\n")[1:-1]


def run(scene: Coroutine[Any, Any, None]) -> None:
    run_virtual(scene)


def test_all_viewers_get_each_page_at_once_and_every_second() -> None:
    async def scene() -> None:
        stage = Stage()
        first = stage.look()
        await stage.clock.sleep(EVERY_S / 2)
        second = stage.look()
        await stage.clock.sleep(WINDOW_S)
        shown = [each for each in events(first) if each.startswith("event: status\n")]
        assert shown == [f'event: status\ndata: {{\ndata: "rendered":{n}}}' for n in (1, 3, 4, 5)]
        assert len([each for each in events(second) if each.startswith("event: status\n")]) == 4
        assert stage.rendered == 5

    run(scene())


@pytest.mark.parametrize(
    ("cost_s", "period_s"),
    [(0.5 * MOST_SHARE, EVERY_S), (2.5 * MOST_SHARE, 2.5), (1.0, MOST_EVERY_S)],
)
def test_pages_that_cost_much_come_less_often_within_a_bound(cost_s: float, period_s: float) -> None:
    async def scene() -> None:
        stage = Stage(cost_s=cost_s)
        stage.look()
        # The first second passes before the cost of all viewers is known.
        await stage.clock.sleep(EVERY_S + 4.5 * period_s)
        assert stage.rendered == 6

    run(scene())


def test_a_page_that_fails_is_an_event_with_its_error() -> None:
    async def scene() -> None:
        failed = [each for each in events(Stage().look()) if each.startswith("event: requests\n")]
        assert len(failed) == 1
        assert '"code":"shutting_down"' in failed[0]

    run(scene())


def test_a_page_that_no_viewer_wants_is_not_rendered() -> None:
    async def scene() -> None:
        stage = Stage()
        wire = stage.look(b"pages=requests")
        await stage.clock.sleep(WINDOW_S)
        assert stage.rendered == 0
        assert {each.partition("\n")[0] for each in events(wire)} == {"event: requests"}
        stage.look(b"pages=status,requests")
        await stage.clock.sleep(WINDOW_S)
        assert stage.rendered == 4
        assert {each.partition("\n")[0] for each in events(wire)} == {"event: requests"}

    run(scene())


@pytest.mark.parametrize("query", [b"pages=costs", b"pages=", b"pages=status%2Cnone", b"pages=\xff"])
def test_a_page_that_is_not_streamed_is_refused(query: bytes) -> None:
    async def scene() -> None:
        with pytest.raises(RequestError, match="status, requests"):
            Stage().look(query)

    run(scene())


def test_nothing_is_rendered_for_viewers_who_have_left() -> None:
    async def scene() -> None:
        stage = Stage()
        exchange = exchange_on(RecordingWire())
        stage.live.serve(exchange)
        exchange.gone("client_closed")
        await stage.clock.sleep(WINDOW_S)
        assert stage.rendered == 1

    run(scene())


def test_a_viewer_who_reads_too_slowly_misses_events() -> None:
    async def scene() -> None:
        stage = Stage()
        wire = stage.look()
        had = len(wire.sent)
        wire.lagging = True
        await stage.clock.sleep(WINDOW_S)
        assert len(wire.sent) == had
        wire.lagging = False
        await stage.clock.sleep(EVERY_S)
        assert len(wire.sent) > had

    run(scene())


def test_streams_end_when_the_gateway_drains_and_after_some_minutes() -> None:
    async def scene() -> None:
        stage = Stage()
        early = stage.look()
        await stage.clock.sleep(STREAM_S - 2 * EVERY_S)
        late = stage.look()
        await stage.clock.sleep(4 * EVERY_S)
        assert early.closed is False
        assert events(late)
        had = len(late.sent)
        stage.draining = True
        await stage.clock.sleep(2 * EVERY_S)
        assert late.closed is False
        assert late.sent[had:].endswith(b"0\r\n\r\n")
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scene())


def test_a_viewer_too_many_is_refused_until_another_leaves() -> None:
    async def scene() -> None:
        stage = Stage()
        first = exchange_on(RecordingWire())
        stage.live.serve(first)
        for _ in range(MOST_VIEWERS - 1):
            stage.look()
        with pytest.raises(CapacityError):
            stage.look()
        first.gone("client_closed")
        assert events(stage.look()) != []

    run(scene())
