"""Three cells of real processes in network namespaces, with delay between them: one is cut off while it runs
streams of another. `tests/simulation/test_cell_losses.py` has every kind of loss in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.kit.lab import netns
from tests.kit.lab.cells import KEY, LabCells
from tests.kit.lab.gateway import until
from tests.kit.lab.stream import Ask, complete, open_stream
from tests.kit.programs import program

from kvasir.clock import MonotonicClock

pytestmark = [pytest.mark.soak, pytest.mark.slow]

DELAYS = {("eu", "us"): 0.02, ("ap", "eu"): 0.06, ("ap", "us"): 0.08}
SERVED_WITHIN_S = 3.0


def ask(first: int, tokens: int) -> Ask:
    """A greedy completion with the key of all cells."""
    return Ask(tuple(range(first, first + 40)), tokens, headers=(f"Authorization: Bearer {KEY}",))


async def test_streams_go_on_in_a_third_cell_without_a_wrong_token(tmp_path: Path) -> None:
    program("ip")
    if (missing := netns.available()) is not None:
        pytest.skip(missing)
    clock = MonotonicClock()
    async with LabCells(tmp_path, DELAYS, clock) as cells:
        home = cells["eu"]
        assert home.worker is not None
        await home.worker.kill()

        async def without_worker() -> bool:
            return not (await cells.state("eu", "eu"))["models"]

        await until(without_worker, 10.0, "eu without a worker", clock, 0.05)
        streams = [await open_stream(home.address, ask(100 * i, 200), clock) for i in range(6)]
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
        assert (await cells.state("eu", "us"))["in_flight"] == len(streams)
        await cells["us"].namespace.down()
        cut_s = clock.now()
        new = await asyncio.gather(
            *(complete(home.address, ask(2000 + 100 * i, 20), clock) for i in range(4))
        )
        assert [each.error for each in new] == [""] * 4
        assert all(each.exact for each in new)
        assert max(each.times_s[0] for each in new) - cut_s < SERVED_WITHIN_S
        await asyncio.gather(*(stream.ended.wait() for stream in streams))
        assert [stream.outcome.error for stream in streams] == [""] * len(streams)
        assert all(stream.outcome.exact for stream in streams)
        assert (await cells.state("eu", "us"))["lost"] >= len(streams)
        assert sum((await cells.state("eu", "ap"))["sent"].values()) == len(streams) + len(new)
        await cells["us"].namespace.up()

        async def back() -> bool:
            return bool((await cells.state("eu", "us"))["state"] == "fresh")

        await until(back, 20.0, "us is used again", clock, 0.1)
        again = await complete(home.address, ask(3000, 20), clock)
        assert again.exact
