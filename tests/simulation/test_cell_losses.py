"""Three cells with delays between them, in virtual time: where requests run, and what becomes of them when a
cell is lost, cut off, full or restarted. Every token is checked, and that no two cells run a request at
once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from tests.kit.sim.cells import SimCell, SimCells

from kvasir.config.spec.deployment import Deployment, SimSpec
from kvasir.core.errors import CapacityError, RequestError, UpstreamError
from kvasir.core.media.prompts import PromptMedia
from kvasir.core.requests import Request, Sampling, token_ids
from kvasir_platform.sim.chaos.checks import broken_streams
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_platform.sim.stories import small_deployment

DELAYS = {("eu", "us"): 0.02, ("ap", "eu"): 0.06, ("ap", "us"): 0.08}
NOBODY: frozenset[str] = frozenset()
SERVED_WITHIN_S = 3.0
LONG = Sampling(max_tokens=300, temperature=0.0, ignore_eos=True)
"""Six seconds of steps."""


def cell() -> Deployment:
    """A small deployment whose steps take 20 ms."""
    spec = small_deployment(1, 1)
    steps = {"sim": SimSpec(prefill_tokens_per_s=20_000.0, decode_step_s=0.02)}
    pools = [pool.model_copy(update={"engine": pool.engine.model_copy(update=steps)}) for pool in spec.pools]
    return spec.model_copy(update={"pools": tuple(pools)})


def played(story: Callable[[SimCells], Awaitable[Iterable[ClientStream]]], **regions: Any) -> SimCells:
    """Play a story; check its streams, and that each request ran in one cell at a time."""

    async def main() -> SimCells:
        async with SimCells(cell(), VirtualClock(), DELAYS, **regions) as cells:
            streams = list(await story(cells))
            for stream in streams:
                await stream.ended.wait()
            assert list(broken_streams(cell(), streams, NOBODY)) == []
            assert cells.twice == set()
        return cells

    return run_virtual(main())


async def without_workers(home: SimCell) -> None:
    """Take all workers of a cell away."""
    for worker_id in list(home.cluster.workers):
        await home.cluster.kill(worker_id)
        await home.cluster.forget(worker_id)
    while home.cluster.router.not_ready_reason() is None:
        await home.cluster.clock.sleep(0.05)
    await home.cluster.clock.sleep(0.5)


async def begun(cells: SimCells, home: SimCell, count: int, sampling: Sampling = LONG) -> list[ClientStream]:
    """Streams that have their first token."""
    streams = [home.submit(f"r{i}", range(i, 64 + i), sampling) for i in range(count)]
    for stream in streams:
        await stream.started.wait()
    return streams


def served_by(stream: ClientStream) -> str:
    """The cell that ended the stream, "" for its own."""
    assert stream.summary is not None
    worker = stream.summary.decode_worker or ""
    return worker.partition("/")[0] if "/" in worker else ""


def test_an_idle_cell_serves_its_own_requests() -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        streams = await begun(cells, cells["eu"], 4, Sampling(max_tokens=8, temperature=0.0, ignore_eos=True))
        await asyncio.gather(*(stream.finished() for stream in streams))
        assert {served_by(stream) for stream in streams} == {""}
        assert [view.state for view in cells["eu"].router.cells()] == ["here", "fresh", "fresh"]
        return streams

    played(story)


def test_a_cell_without_workers_is_served_by_the_nearest_other_one() -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        await without_workers(home)
        assert home.router.not_ready_reason() is None
        streams = await begun(cells, home, 4)
        await asyncio.gather(*(stream.finished() for stream in streams))
        assert {served_by(stream) for stream in streams} == {"us"}
        assert all(
            stream.summary.ttft_s and stream.summary.ttft_s > 0.04 for stream in streams if stream.summary
        )
        return streams

    played(story)


def test_requests_that_wait_for_workers_that_are_lost_go_to_another_cell() -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        for worker_id in list(home.cluster.workers):
            await home.cluster.kill(worker_id)
        streams = [home.submit(f"r{i}", range(i, 64 + i)) for i in range(3)]
        began = cells.clock.now()
        await asyncio.gather(*(stream.finished() for stream in streams))
        assert cells.clock.now() - began < SERVED_WITHIN_S
        assert {served_by(stream) for stream in streams} == {"us"}
        return streams

    played(story)


def test_streams_go_on_in_a_third_cell_when_theirs_is_cut_off_and_new_ones_are_served_in_time() -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        await without_workers(home)
        streams = await begun(cells, home, 4)
        cells.links.cut("us")
        cut_s = cells.clock.now()
        new = [home.submit(f"n{i}", range(i, 32 + i)) for i in range(4)]
        await asyncio.gather(*(stream.finished() for stream in new))
        assert cells.clock.now() - cut_s < SERVED_WITHIN_S
        await asyncio.gather(*(stream.finished() for stream in streams))
        assert {served_by(stream) for stream in (*streams, *new)} == {"ap"}
        assert all(stream.summary.migrations == 1 for stream in streams if stream.summary)
        (us,) = (view for view in home.router.cells() if view.cell == "us")
        assert us.state == "unreachable"
        assert us.lost == 8
        assert cells["us"].runs() == set()
        return [*streams, *new]

    played(story)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(max_tokens=100, temperature=0.7, seed=3, ignore_eos=True), id="a seed"),
        pytest.param(Sampling(max_tokens=100, temperature=0.0, n=2, ignore_eos=True), id="two choices"),
    ],
)
def test_streams_that_cannot_be_extended_are_repeated_and_compared(sampling: Sampling) -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        await without_workers(home)
        streams = await begun(cells, home, 2, sampling)
        cells.links.cut("us")
        await asyncio.gather(*(stream.finished() for stream in streams))
        assert {served_by(stream) for stream in streams} == {"ap"}
        return streams

    played(story)


def test_a_stream_that_cannot_be_repeated_exactly_ends_with_the_reason() -> None:
    drawn = Sampling(max_tokens=100, temperature=0.7, presence_penalty=0.5, ignore_eos=True)

    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        await without_workers(home)
        (stream,) = await begun(cells, home, 1, drawn)
        cells.links.cut("us")
        with pytest.raises(UpstreamError, match="send the request again") as failed:
            await stream.finished()
        assert failed.value.code == "cell_lost"
        (us,) = (view for view in home.router.cells() if view.cell == "us")
        assert us.lost == 1
        return []

    played(story)


@pytest.mark.parametrize("cut_s", [0.3, 0.85, 1.05, 1.3, 2.0, 5.0])
def test_a_link_that_comes_back_adds_no_token_and_no_second_execution(cut_s: float) -> None:
    """What was held back arrives then: beats, deltas, and the end of the link."""

    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        await without_workers(home)
        streams = await begun(cells, home, 3)
        cells.links.cut("us")
        await cells.clock.sleep(cut_s)
        cells.links.heal()
        await asyncio.gather(*(stream.finished() for stream in streams))
        return streams

    played(story)


def test_a_request_that_has_lost_three_cells_ends_with_the_fourth() -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        await without_workers(home)
        (stream,) = await begun(cells, home, 1, replace(LONG, max_tokens=500))
        # By the last loss, the cell before it is used again.
        for served_s in (0.3, 0.3, 0.3, 5.0):
            while not (at := [name for name in ("us", "ap") if cells[name].runs()]):
                assert not stream.ended.is_set()
                await cells.clock.sleep(0.05)
            await cells.clock.sleep(served_s)
            for pair, end in cells.links.ends:
                if pair == {"eu", at[0]}:
                    await end.close()
            while cells[at[0]].runs():
                await cells.clock.sleep(0.05)
        with pytest.raises(UpstreamError, match="was lost") as failed:
            await stream.finished()
        assert failed.value.code == "cell_lost"
        assert sum(view.lost for view in home.router.cells()) == 4
        return []

    played(story)


def test_without_another_cell_a_lost_one_ends_its_streams_with_the_reason() -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        await without_workers(home)
        (stream,) = await begun(cells, home, 1)
        cells.links.cut("us", "ap")
        with pytest.raises(UpstreamError, match="Cell us was lost"):
            await stream.finished()
        return []

    played(story)


def test_a_tenant_whose_data_stays_is_refused_with_the_reason_and_never_leaves() -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        with pytest.raises(RequestError, match="Data of tenant bank stays in eu, and this is us") as refused:
            cells["us"].submit("far", range(32), tenant="bank")
        assert (refused.value.status, refused.value.code) == (403, "data_residency")
        await without_workers(home)
        stream = home.submit("near", range(32), tenant="bank")
        await cells.clock.sleep(5.0)
        assert not stream.started.is_set()
        assert not stream.ended.is_set()
        assert [view.sent for view in home.router.cells()[1:]] == [{}, {}]
        assert all(not cells[name].runs() for name in ("us", "ap"))
        home.router.cancel("near")
        other = home.submit("other", range(32), tenant="shop")
        await other.finished()
        assert served_by(other) == "us"
        return [other]

    played(story, residency={"bank": ("eu",)})


@pytest.mark.parametrize(
    "asks",
    [
        pytest.param({"worker": "decode-0"}, id="a worker"),
        pytest.param({"adapter": "poet"}, id="an adapter that no cell has"),
        pytest.param({"media": (PromptMedia(0, 4, bytes(32), b""),)}, id="an image of a model of text"),
        pytest.param({"sampling": replace(LONG, prompt_logprobs=1)}, id="log probabilities of the prompt"),
    ],
)
def test_what_only_its_own_cell_has_keeps_a_request_there(asks: dict[str, Any]) -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        await without_workers(home)
        stream = ClientStream(replace(Request("r", cell().model.name, token_ids(range(32)), LONG), **asks))
        with suppress(RequestError):
            home.router.submit(stream.request, stream)
        await cells.clock.sleep(2.0)
        assert [view.sent for view in home.router.cells()[1:]] == [{}, {}]
        assert all(not cells[name].runs() for name in ("us", "ap"))
        home.router.cancel("r")
        return []

    played(story)


def test_a_cell_with_another_tokenizer_gets_no_requests() -> None:
    async def main() -> None:
        cells = SimCells(cell(), VirtualClock(), DELAYS)
        cells["us"].tokenizer = "another"
        async with cells:
            await without_workers(cells["eu"])
            (stream,) = await begun(cells, cells["eu"], 1)
            await stream.finished()
            assert served_by(stream) == "ap"

    run_virtual(main())


def test_a_full_cell_spills_over_to_one_that_answers_sooner() -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        # Its rate is known once it has computed prompts.
        first = [home.submit(f"w{i}", range(i, 3000 + i)) for i in range(4)]
        await asyncio.gather(*(stream.finished() for stream in first))
        streams = []
        for i in range(60):
            streams.append(home.submit(f"r{i}", range(i * 7, 3500 + i * 7)))
            await cells.clock.sleep(0.1)
        await asyncio.gather(*(stream.finished() for stream in streams))
        places = [served_by(stream) for stream in streams]
        assert places[0] == ""
        assert places.count("us") > 10
        sent = {view.cell: view.sent for view in home.router.cells()}
        assert sent["us"]["spill_over"] > 10
        return streams

    played(story)


def test_a_request_that_came_from_another_cell_is_not_sent_on() -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        await without_workers(home)
        stream = home.submit("r", range(32))
        await cells.clock.sleep(0.021)
        await without_workers(cells["us"])
        await stream.ended.wait()
        # Its origin chose again: us has not sent it anywhere.
        assert cells["us"].router.cells()[0].sent == {}
        assert served_by(stream) == "ap"
        return [stream]

    played(story)


def test_a_cell_that_stops_in_order_gives_its_streams_to_another_one() -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home, us = cells["eu"], cells["us"]
        await without_workers(home)
        streams = await begun(cells, home, 2)
        us.router.leave()
        await cells.clock.sleep(1.5)
        new = home.submit("new", range(32))
        await new.finished()
        assert served_by(new) == "ap"
        await us.cluster.router.close()
        await asyncio.gather(*(stream.finished() for stream in streams))
        assert {served_by(stream) for stream in streams} == {"ap"}
        return [*streams, new]

    played(story)


def test_a_client_that_leaves_frees_the_other_cell_at_once() -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        await without_workers(home)
        (stream,) = await begun(cells, home, 1)
        home.router.cancel("r0")
        await cells.clock.sleep(0.1)
        assert cells["us"].runs() == set()
        assert not stream.ended.is_set()
        assert home.router.in_flight == 0
        return []

    played(story)


def test_a_cell_takes_no_more_requests_of_another_than_agreed() -> None:
    async def story(cells: SimCells) -> list[ClientStream]:
        home = cells["eu"]
        await without_workers(home)
        streams = [home.submit(f"r{i}", range(i, 64 + i)) for i in range(4)]
        with pytest.raises(CapacityError):
            home.submit("r4", range(64))
        await asyncio.gather(*(stream.finished() for stream in streams))
        assert {served_by(stream) for stream in streams} == {"us", "ap"}
        return streams

    played(story, max_forwarded=2)
