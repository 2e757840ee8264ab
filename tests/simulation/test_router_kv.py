"""The router's index of workers' blocks, with the production router and session code: exact at rest, whatever
failed before, and never a reason to delay a request."""

from __future__ import annotations

import asyncio
from collections import deque
from random import Random

import msgspec
import pytest

from kvasir.config.spec.deployment import Deployment
from kvasir.core.kv import KvEventKind, KvState, KvStatus, Medium
from kvasir.core.requests import Sampling, token_ids
from kvasir.native import chain_hashes, root_hash
from kvasir.native._twin import record
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.stories import simulate
from kvasir_platform.sim.stories import small_deployment as deployment
from kvasir_workers.server.holdings import Holdings

LONG = 320


def prompt(rng: Random, length: int) -> list[int]:
    return [rng.randrange(4000) for _ in range(length)]


def kv(cluster: Cluster, worker_id: str) -> KvStatus:
    (view,) = [view for view in cluster.router.workers() if view.worker_id == worker_id]
    assert view.kv is not None
    return view.kv


def states(cluster: Cluster) -> set[KvState]:
    return {kv(cluster, worker_id).state for worker_id in cluster.workers}


def record_of(cluster: Cluster, worker_id: str) -> Holdings:
    record = cluster.workers[worker_id].engine.kv
    assert isinstance(record, Holdings)
    return record


def check_exact(cluster: Cluster) -> None:
    """Every worker's view is exact, counts what its engine holds, and nothing is foreseen any more."""
    for worker_id, worker in cluster.workers.items():
        status = kv(cluster, worker_id)
        assert status.state is KvState.EXACT, f"{worker_id}: {status}"
        ranks, known = range(worker.host.identity.data_parallel_size), record_of(cluster, worker_id)
        assert status.blocks == sum(known.held(rank, medium) for rank in ranks for medium in Medium)
        assert status.predicted_blocks == 0


async def warm(cluster: Cluster, rng: Random, count: int = 6) -> list[list[int]]:
    """Prompts that have been served, one after the other."""
    prompts = [prompt(rng, LONG) for _ in range(count)]
    for tokens in prompts:
        await cluster.submit(tokens).finished()
    # Until reports are in, and predictions for which they stand have gone.
    await cluster.clock.sleep(2.0)
    return prompts


async def hits(cluster: Cluster, prompts: list[list[int]]) -> int:
    """Serve them again; returns the hits, all of which were foreseen to the token."""
    cached = 0
    for tokens in prompts:
        summary = await cluster.submit(tokens).finished()
        assert summary.predicted_cached_tokens == summary.usage.cached_tokens
        cached += summary.usage.cached_tokens
    return cached


def two_ranks() -> Deployment:
    spec = deployment()
    pools = tuple(
        pool.model_copy(update={"engine": pool.engine.model_copy(update={"data_parallel_size": 2})})
        for pool in spec.pools
    )
    return spec.model_copy(update={"pools": pools})


@pytest.mark.parametrize("spec", [deployment(), two_ranks()], ids=["one rank", "two ranks"])
def test_hits_are_foreseen_to_the_token_and_the_view_is_exact(spec: Deployment) -> None:
    async def story(cluster: Cluster) -> None:
        prompts = await warm(cluster, Random(1))
        check_exact(cluster)
        assert await hits(cluster, prompts) >= 6 * (LONG - 16)

    simulate(spec, story)


def test_a_router_that_joins_late_knows_what_workers_hold_and_needs_no_traffic_for_it() -> None:
    async def story(cluster: Cluster) -> None:
        prompts = await warm(cluster, Random(2))
        await cluster.restart_router()
        await cluster.clock.sleep(0.1)
        check_exact(cluster)
        assert await hits(cluster, prompts) >= 6 * (LONG - 16)

    simulate(deployment(), story)


@pytest.mark.parametrize("parts", [[0], [0, 0, 0], [1]])
def test_a_snapshot_that_is_cut_is_asked_for_again_and_requests_go_on(parts: list[int]) -> None:
    async def story(cluster: Cluster) -> None:
        prompts = await warm(cluster, Random(3))
        for worker_id in cluster.workers:
            cluster.network.snapshot_faults(worker_id).cuts = deque(parts)
        await cluster.restart_router()
        await cluster.submit(prompts[0]).finished()
        await cluster.clock.sleep(3.0)
        check_exact(cluster)
        await hits(cluster, prompts)

    simulate(deployment(), story)


def test_while_a_snapshot_is_on_its_way_requests_are_served_by_prediction() -> None:
    async def story(cluster: Cluster) -> None:
        rng = Random(4)
        await warm(cluster, rng)
        gate = asyncio.Event()
        for worker_id in cluster.workers:
            cluster.network.snapshot_faults(worker_id).gate = gate
        await cluster.restart_router()
        tokens = prompt(rng, LONG)
        first = await cluster.submit(tokens).finished()
        second = await cluster.submit(tokens).finished()
        assert second.prefill_worker == first.prefill_worker
        assert second.predicted_cached_tokens == second.usage.cached_tokens == LONG - 16
        assert states(cluster) == {KvState.CATCHING_UP}
        gate.set()
        await cluster.clock.sleep(2.0)
        check_exact(cluster)

    simulate(deployment(), story)


def test_a_worker_that_will_never_give_a_snapshot_is_routed_to_by_prediction_and_says_why() -> None:
    async def story(cluster: Cluster) -> None:
        for worker_id in cluster.workers:
            cluster.network.snapshot_faults(worker_id).refusal = "no record here"
        await cluster.restart_router()
        prompts = await warm(cluster, Random(5))
        for worker_id in cluster.workers:
            status = kv(cluster, worker_id)
            assert (status.state, status.reason) == (KvState.PREDICTED, "no record here")
        assert await hits(cluster, prompts) >= 6 * (LONG - 16)

    simulate(deployment(), story)


def test_a_worker_that_lost_its_record_is_not_trusted_until_it_has_one_again() -> None:
    async def story(cluster: Cluster) -> None:
        await warm(cluster, Random(6))
        victim = next(w for w in cluster.workers if w.startswith("prefill") and kv(cluster, w).blocks)
        record = record_of(cluster, victim)
        record.lose("the event ring has overflowed")
        await cluster.clock.sleep(1.0)
        lost = kv(cluster, victim)
        assert (lost.state, lost.blocks, lost.epoch) == (KvState.CATCHING_UP, 0, record.epoch)
        assert "the event ring has overflowed" in lost.reason
        assert (await cluster.submit(range(64)).finished()).outcome == "ok"
        record.restore()
        await cluster.clock.sleep(10.0)
        check_exact(cluster)
        assert kv(cluster, victim).resyncs == 1

    simulate(deployment(), story)


def test_a_worker_that_restarts_is_empty_and_exact_again() -> None:
    async def story(cluster: Cluster) -> None:
        prompts = await warm(cluster, Random(7))
        victim = next(w for w in cluster.workers if w.startswith("prefill") and kv(cluster, w).blocks)
        await cluster.kill(victim)
        await cluster.forget(victim)
        await cluster.add("prefill")
        await cluster.ready()
        await cluster.clock.sleep(0.1)
        check_exact(cluster)
        await hits(cluster, prompts)

    simulate(deployment(), story)


def test_a_cut_connection_loses_no_report() -> None:
    async def story(cluster: Cluster) -> None:
        rng = Random(8)
        for _ in range(10):
            stream = cluster.submit(prompt(rng, LONG))
            await cluster.clock.sleep(0.01)
            cluster.network.cut()
            await stream.finished()
        await cluster.clock.sleep(2.0)
        check_exact(cluster)
        assert {kv(cluster, worker_id).resyncs for worker_id in cluster.workers} == {0}

    simulate(deployment(), story)


@pytest.mark.parametrize("mode", ["hybrid", "reported", "predicted"])
def test_a_pool_is_indexed_as_its_spec_says(mode: str) -> None:
    async def story(cluster: Cluster) -> None:
        await warm(cluster, Random(9))
        expected = KvState.PREDICTED if mode == "predicted" else KvState.EXACT
        assert states(cluster) == {expected}
        stream = cluster.submit(range(LONG))
        await cluster.clock.sleep(0)
        predicted = sum(kv(cluster, worker_id).predicted_blocks for worker_id in cluster.workers)
        assert (predicted > 0) == (mode != "reported")
        await stream.finished()

    spec = deployment()
    pools = tuple(pool.model_copy(update={"kv_index": mode}) for pool in spec.pools)
    simulate(spec.model_copy(update={"pools": pools}), story)


def test_what_a_cancelled_request_would_have_left_is_not_foreseen() -> None:
    async def story(cluster: Cluster) -> None:
        stream = cluster.submit(range(4000), Sampling(max_tokens=4))
        await cluster.clock.sleep(0.01)
        assert any(kv(cluster, worker_id).predicted_blocks for worker_id in cluster.workers)
        cluster.router.cancel(stream.request.request_id)
        assert not any(kv(cluster, worker_id).predicted_blocks for worker_id in cluster.workers)

    simulate(deployment(), story)


@pytest.mark.parametrize("medium", [Medium.CPU, Medium.DISK, Medium.REMOTE])
def test_what_a_worker_keeps_below_the_device_is_known_and_draws_requests(medium: Medium) -> None:
    async def story(cluster: Cluster) -> None:
        tokens = prompt(Random(10), LONG)
        root = root_hash(cluster.deployment.model.name, "", "")
        log = record(KvEventKind.STORED, medium, 0, root, chain_hashes(token_ids(tokens), 16, root))
        holder = sorted(worker_id for worker_id in cluster.workers if worker_id.startswith("prefill"))[-1]
        event = {"type": "KvasirTierChanged", "log": log}
        record_of(cluster, holder).ingest(0, msgspec.msgpack.encode([0.0, [event], 0]))
        await cluster.clock.sleep(1.0)
        check_exact(cluster)
        assert kv(cluster, holder).blocks == LONG // 16
        await cluster.restart_router()
        await cluster.clock.sleep(0.1)
        stream = cluster.submit(tokens)
        await stream.finished()
        decision = cluster.router.explain(stream.request.request_id)
        assert decision is not None
        assert (decision.prefill_worker, decision.predicted_tier_tokens) == (holder, LONG - 16)

    simulate(deployment(), story)


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_over_small_caches_ends_with_an_exact_view(seed: int) -> None:
    async def story(cluster: Cluster) -> None:
        rng = Random(seed)
        families = [prompt(rng, 300) for _ in range(6)]
        for round_ in range(4):
            streams = []
            for _ in range(30):
                tokens = rng.choice(families)[: rng.randrange(1, 300)] + prompt(rng, rng.randrange(0, 600))
                streams.append(cluster.submit(tokens))
                await cluster.clock.sleep(rng.random() * 0.02)
            cluster.network.cut(rng.choice(sorted(cluster.workers)))
            cluster.network.snapshot_faults(rng.choice(sorted(cluster.workers))).cuts.append(0)
            for stream in streams:
                await stream.finished()
            if round_ == 1:
                await cluster.restart_router()
        await cluster.clock.sleep(3.0)
        check_exact(cluster)
        assert max(record_of(cluster, worker_id).held(0) for worker_id in cluster.workers) > 200

    # Of 256 blocks, the fewest that a request of the longest length fits in.
    spec = deployment()
    pools = tuple(
        pool.model_copy(update={"engine": pool.engine.model_copy(update={"kv_cache_bytes": 8 << 20})})
        for pool in spec.pools
    )
    simulate(spec.model_copy(update={"pools": pools}), story, seed)
