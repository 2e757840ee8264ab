"""A fleet whose test leaves something behind fails that test."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.kit.lab.fleet import Fleet, Layout
from tests.kit.lab.invariants import SPARE_DESCRIPTORS, Violated, at_rest, ends_at_rest
from tests.kit.lab.stream import Ask, Stream, open_stream

from kvasir.clock import MonotonicClock
from kvasir.config.load.loader import loads

pytestmark = pytest.mark.slow

SPEC = """
name: left
disaggregation: never
pools: [{name: both, role: both, engine: {kind: sim, sim: {decode_step_s: 0.02}}}]
"""
LONG = 3000


async def running(fleet: Fleet) -> Stream:
    """A stream that goes on for long."""
    stream = await open_stream(fleet.address, Ask((5, 6, 7), LONG), fleet.clock)
    await stream.begun.wait()
    return stream


async def test_what_runs_and_what_stays_open_after_a_test_fails_it(tmp_path: Path) -> None:
    left: list[Stream] = []
    opened: list[asyncio.StreamWriter] = []

    async def leave_connections(fleet: Fleet) -> None:
        host, _, port = fleet.address.partition(":")
        async with ends_at_rest(fleet):
            for _ in range(2 * SPARE_DESCRIPTORS):
                opened.append((await asyncio.open_connection(host, int(port)))[1])

    async def leave_a_stream() -> None:
        spec, clock = loads(SPEC, "kvasir.yaml"), MonotonicClock()
        async with Fleet(tmp_path, spec, Layout({"both": 1}), clock=clock, rest_s=0.5) as fleet:
            with pytest.raises(Violated, match="descriptors leaked"):
                await leave_connections(fleet)
            for each in opened:
                each.close()
            (await running(fleet)).disconnect()
            await at_rest(fleet, 30.0)
            left.append(await running(fleet))

    with pytest.raises(Violated, match="1 requests in flight"):
        await leave_a_stream()
    await left[0].ended.wait()
