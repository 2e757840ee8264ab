"""An hour of Poisson traffic on simulated engines, in seconds of a real clock."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from dataclasses import dataclass

import pytest
from tests.kit.engines.bench import EngineBench, start_bench

from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec, PoolSpec
from kvasir.core.requests import EngineRequest, FinishReason, Leg, Role, Sampling
from kvasir_platform.sim.cluster import ClientStream, Cluster
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_platform.sim.stories import simulate, small_deployment
from kvasir_platform.sim.traffic import Arrival, TrafficShape, poisson_traffic
from kvasir_workers.engines.sim.engine import SimEngine
from kvasir_workers.engines.sim.fabric import SimFabric

log = logging.getLogger(__name__)

HOUR = TrafficShape(rate=1.0, seconds=3600.0)


@dataclass
class Summary:
    """What an hour came to."""

    requests: int = 0
    tokens: int = 0
    virtual_s: float = 0.0
    cached_tokens: int = 0
    moved_bytes: int = 0


def _deployment(replicas: int) -> Deployment:
    engine = EngineSpec(kind="sim", kv_cache_bytes=32 << 20)
    return Deployment(
        model=ModelSpec(max_model_len=1024),
        pools=(
            PoolSpec(name="prefill", role=Role.PREFILL, replicas=replicas, engine=engine),
            PoolSpec(name="decode", role=Role.DECODE, replicas=replicas, engine=engine),
        ),
    )


async def _serve(arrival: Arrival, number: int, prefill: EngineBench, decode: EngineBench) -> None:
    sampling = Sampling(max_tokens=arrival.output_tokens, temperature=0.0, ignore_eos=True)
    first = EngineRequest(f"{number}-p", arrival.tokens, sampling, leg=Leg.PREFILL)
    prefill.engine.submit([first])
    offered = (await prefill.recorder.wait(first.request_id)).last
    assert offered is not None
    second = EngineRequest(str(number), arrival.tokens, sampling, leg=Leg.DECODE, handoff=offered.handoff)
    decode.engine.submit([second])
    await decode.recorder.wait(second.request_id)


async def _hour(seed: int, replicas: int) -> Summary:
    spec = _deployment(replicas)
    clock, fabric = VirtualClock(), SimFabric()
    engines: list[SimEngine] = []
    benches: dict[str, list[EngineBench]] = {"prefill": [], "decode": []}
    for pool, number in itertools.product(spec.pools, range(replicas)):
        engines.append(SimEngine(spec, pool, clock=clock, fabric=fabric))
        benches[pool.name].append(await start_bench(engines[-1], f"{pool.name}-{number}"))
    summary = Summary()
    async with asyncio.TaskGroup() as group:
        for number, arrival in enumerate(poisson_traffic(random.Random(seed), HOUR)):
            await clock.sleep(arrival.at_s - clock.now())
            prefill = benches["prefill"][arrival.group % replicas]
            decode = benches["decode"][arrival.group % replicas]
            group.create_task(_serve(arrival, number, prefill, decode))
            summary.requests += 1
    summary.virtual_s = clock.now()
    for engine in engines:
        engine.check_integrity()
        load = engine.load()
        assert (load.running, load.waiting, load.kv_usage, load.kv_blocks_leased) == (0, 0, 0.0, 0)
        summary.cached_tokens += load.prefix_hits_tokens
        summary.moved_bytes += load.transfer_bytes_received
    for bench in itertools.chain(*benches.values()):
        assert bench.recorder.violations == []
        for recorded in bench.recorder.requests.values():
            assert recorded.choice().finish is FinishReason.LENGTH
            summary.tokens += len(recorded.choice().tokens)
        await bench.engine.stop()
    return summary


@pytest.mark.slow
def test_an_hour_of_poisson_traffic_passes_in_seconds() -> None:
    # Processor time, which does not depend on what else the machine does.
    started = time.process_time()
    summary = run_virtual(_hour(seed=1, replicas=2))
    cpu_s = time.process_time() - started
    speed_up = summary.virtual_s / cpu_s
    log.info("%s in %.1f CPU s: %.0f times as fast", summary, cpu_s, speed_up)
    assert summary.requests > 3400
    assert summary.virtual_s > 3590
    assert summary.tokens > 40 * summary.requests
    # The common prefixes are found again, and only the rest is computed or moved.
    assert summary.cached_tokens > 128 * summary.requests
    assert speed_up > 60


@pytest.mark.slow
def test_an_hour_of_poisson_traffic_through_the_router_ends_with_every_stream_whole() -> None:
    shape = TrafficShape(rate=0.25, seconds=3600.0)
    streams: list[tuple[ClientStream, Arrival]] = []

    async def story(cluster: Cluster) -> None:
        began = cluster.clock.now()
        for arrival in poisson_traffic(random.Random(2), shape):
            await cluster.clock.sleep(began + arrival.at_s - cluster.clock.now())
            sampling = Sampling(max_tokens=arrival.output_tokens, temperature=0.0, ignore_eos=True)
            streams.append((cluster.submit(arrival.tokens, sampling), arrival))
        for stream, arrival in streams:
            assert (await stream.finished()).outcome == "ok"
            assert len(stream.tokens[0]) == arrival.output_tokens
            assert stream.last is not None
            assert stream.last.finish is FinishReason.LENGTH
        await cluster.rest()
        assert (cluster.router.in_flight, cluster.router.queued) == (0, 0)
        assert {view.in_flight for view in cluster.router.workers()} == {0}
        for worker in cluster.workers.values():
            load = worker.engine.load()
            assert (load.running, load.waiting, load.kv_usage, load.kv_blocks_leased) == (0, 0, 0.0, 0)
            assert (worker.host.live_requests, worker.host.held_leases) == (0, 0)

    started = time.process_time()
    cluster = simulate(small_deployment(), story, seed=2)
    cpu_s = time.process_time() - started
    virtual_s = max(summary.finished_s for summary in cluster.summaries)
    log.info("%d requests in %.1f CPU s: %.0f times as fast", len(streams), cpu_s, virtual_s / cpu_s)
    assert len(streams) == len(cluster.summaries) > 850
    assert virtual_s > 3590
    # The router sends a common prefix back to where it is, and foresees what the engines find.
    assert sum(summary.usage.cached_tokens for summary in cluster.summaries) > 100 * len(streams)
    assert virtual_s / cpu_s > 60
