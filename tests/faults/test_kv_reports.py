"""Cache changes of workers reach every router, cost no stream, and are never lost silently."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from kvasir.core.errors import CapacityError, ProtocolError
from kvasir.core.kv import KvBatch, Medium, TierLoad
from kvasir.core.messages import Hello, RouterFrame, WorkerFrame
from kvasir.core.requests import EngineLoad, StepBatch, token_ids
from kvasir.core.session_link import LinkLimits
from kvasir.native import root_hash
from kvasir.ports.session import RouterConnection
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_platform.sim.net.transport import MemoryNetwork
from kvasir_router.sessions.session import SessionLost, SessionMessage
from kvasir_workers.server.holdings import Holdings
from kvasir_workers.server.kv_feed import TOO_MANY_SNAPSHOTS
from kvasir_workers.server.sessions import SessionHostLimits

Scenario = Callable[[Any, MemoryNetwork, Holdings], Coroutine[Any, Any, Any]]
Play = Callable[[Scenario], Any]
SLOW = SessionHostLimits(link=LinkLimits(tail_messages=20), resume_window_s=5.0)


@pytest.fixture
def play(make_bench: Any) -> Play:
    """Runs a scenario in virtual time, with a record of an engine's blocks."""

    def play(scenario: Scenario) -> Any:
        async def main() -> Any:
            bench, network = make_bench(VirtualClock()), MemoryNetwork(16)
            record = Holdings(1, lambda salt, adapter: root_hash("m", salt, adapter))
            record.begin(1)
            result = await scenario(bench, network, record)
            await bench.close()
            await network.close()
            return result

        return run_virtual(main())

    return play


def store(record: Holdings, key: int) -> None:
    record.store(0, None, array("Q", [key]), token_ids([key, key]), 2)


def step_batches(router: Any) -> list[StepBatch]:
    messages = [e.message for e in router.events if isinstance(e, SessionMessage)]
    return [message for message in messages if isinstance(message, StepBatch)]


def reports(router: Any) -> list[KvBatch]:
    return [batch.kv for batch in step_batches(router) if batch.kv is not None]


def test_every_router_hears_of_every_change_in_order(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork, record: Holdings) -> None:
        host, _ = await bench.host(kv=record)
        network.listen("w", host.serve)
        one, two = bench.router(network, "w", "one"), bench.router(network, "w", "two")
        await one.ready()
        await two.ready()
        one.session.send(bench.submit(("a", 100, 5)))
        for key in range(1, 30):
            store(record, key)
            await bench.clock.sleep(0.003)
        await one.ended("a")
        await two.until(lambda: len(reports(two)) == len(reports(one)) > 5)
        assert reports(one) == reports(two)
        assert [batch.sequence for batch in reports(one)] == list(range(1, len(reports(one)) + 1))

    play(scenario)


def test_tiers_are_told_a_few_times_a_second_and_not_with_every_token(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork, record: Holdings) -> None:
        host, engine = await bench.host(kv=record)
        tier = TierLoad(Medium.CPU, blocks=7)
        engine.load = lambda: EngineLoad(running=1, tiers=(tier,))
        network.listen("w", host.serve)
        router = bench.router(network, "w")
        await router.ready()
        router.session.send(bench.submit(("a", 100, 400)))
        await router.ended("a")
        loads = [(batch.load.tiers, bool(batch.deltas)) for batch in step_batches(router) if batch.load]
        assert ((tier,), True) not in loads
        assert 6 <= loads.count(((tier,), False)) <= 10
        assert loads.count(((), True)) == 400

    play(scenario)


def test_changes_ride_on_the_step_batch_of_their_step(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork, record: Holdings) -> None:
        host, _ = await bench.host(kv=record)
        network.listen("w", host.serve)
        busy, quiet = bench.router(network, "w", "busy"), bench.router(network, "w", "quiet")
        await busy.ready()
        await quiet.ready()
        busy.session.send(bench.submit(("a", 100, 20)))
        await busy.until(lambda: "a" in busy.tokens)
        store(record, 1)
        await busy.ended("a")
        await quiet.until(lambda: len(reports(quiet)) == 1)
        (riding,) = [batch for batch in step_batches(busy) if batch.kv is not None]
        assert [delta.request_id for delta in riding.deltas] == ["a"]
        (alone,) = [batch for batch in step_batches(quiet) if batch.kv is not None]
        assert alone.deltas == ()

    play(scenario)


def test_a_change_without_any_step_travels_within_milliseconds(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork, record: Holdings) -> None:
        host, engine = await bench.host(kv=record)
        network.listen("w", host.serve)
        router = bench.router(network, "w")
        await router.ready()
        await engine.stop()
        before = bench.clock.now()
        store(record, 1)
        await router.until(lambda: bool(reports(router)))
        assert bench.clock.now() - before < 0.03

    play(scenario)


async def read_on(connection: RouterConnection, frames: list[WorkerFrame]) -> None:
    """Read and acknowledge for ever."""
    while True:
        frame = await connection.receive()
        frames.append(frame)
        await connection.send(RouterFrame(0, frame.seq))


def test_a_router_that_reads_slowly_misses_changes_and_keeps_its_session(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork, record: Holdings) -> None:
        host, _ = await bench.host(SLOW, kv=record)
        network.listen("w", host.serve)
        slow = await network.dial("w", Hello(router_id="slow"))
        good = bench.router(network, "w", "good")
        await good.ready()
        for key in range(1, 200):
            store(record, key)
            await bench.clock.sleep(0.005)
        assert host.sessions == 2
        await good.until(lambda: len(reports(good)) >= 190)
        assert SessionLost not in [type(event) for event in good.told()]
        frames: list[WorkerFrame] = []
        reading = asyncio.ensure_future(read_on(slow, frames))
        await bench.clock.sleep(1.0)
        reading.cancel()
        heard = [f.payload.kv for f in frames if isinstance(f.payload, StepBatch) and f.payload.kv]
        assert len(heard) < 20
        # The newest comes as soon as it can be read, so that the gap shows without another change.
        assert heard[-1] == reports(good)[-1]
        assert heard[-1].sequence > heard[-2].sequence + 1
        assert host.sessions == 2
        await slow.close()

    play(scenario)


def test_what_a_slow_router_was_spared_is_not_sent_once_it_is_outdated(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork, record: Holdings) -> None:
        host, _ = await bench.host(SLOW, kv=record)
        network.listen("w", host.serve)
        slow = await network.dial("w", Hello(router_id="slow"))
        for key in range(1, 100):
            store(record, key)
            await bench.clock.sleep(0.005)
        frames: list[WorkerFrame] = []
        reading = asyncio.ensure_future(read_on(slow, frames))
        await bench.clock.sleep(0.01)
        store(record, 1000)
        await bench.clock.sleep(1.0)
        reading.cancel()
        heard = [f.payload.kv.sequence for f in frames if isinstance(f.payload, StepBatch) and f.payload.kv]
        assert heard == sorted(set(heard))
        await slow.close()

    play(scenario)


def test_a_draining_worker_gets_quiet_while_its_cache_still_changes(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork, record: Holdings) -> None:
        host, _ = await bench.host(kv=record)
        network.listen("w", host.serve)
        router = bench.router(network, "w")
        await router.ready()
        router.session.send(bench.submit(("a", 100, 10)))
        await router.until(lambda: "a" in router.tokens)
        store(record, 1)
        assert await host.drain("scaled down", 5.0)
        await router.ended("a")
        await host.close()
        store(record, 2)
        await bench.clock.sleep(0.1)
        assert len(reports(router)) == 1

    play(scenario)


def test_an_engine_without_a_record_has_no_snapshots(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork, record: Holdings) -> None:
        host, _ = await bench.host()
        with pytest.raises(ProtocolError, match="keeps no record"):
            await anext(host.snapshot())

    play(scenario)


def test_only_so_many_snapshots_are_read_at_once(play: Play) -> None:
    async def scenario(bench: Any, network: MemoryNetwork, record: Holdings) -> None:
        host, _ = await bench.host(SessionHostLimits(max_snapshots=2), kv=record)
        store(record, 1)
        async with aclosing(host.snapshot()) as one, aclosing(host.snapshot()) as two:
            assert (await anext(one)).last
            assert (await anext(two)).last
            with pytest.raises(CapacityError) as refused:
                await anext(host.snapshot())
            assert refused.value.code == TOO_MANY_SNAPSHOTS
        async with aclosing(host.snapshot()) as again:
            assert (await anext(again)).last

    play(scenario)
