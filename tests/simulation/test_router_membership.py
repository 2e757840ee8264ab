"""Workers that exit, disconnect, leave or are incompatible, under the production router."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from kvasir.core.requests import Sampling
from kvasir_platform.sim.cluster import ClientStream, Cluster
from kvasir_platform.sim.stories import simulate
from kvasir_platform.sim.stories import small_deployment as deployment
from kvasir_workers.engines.sim.model import SimModel


def prompt(rng: Random, length: int) -> list[int]:
    return [rng.randrange(4000) for _ in range(length)]


def test_a_prefill_worker_killed_in_mid_prompt_costs_a_new_start_and_no_error() -> None:
    async def story(cluster: Cluster) -> None:
        stream = cluster.submit(range(4000))
        await cluster.clock.sleep(0.05)
        (busy,) = [w for w, worker in cluster.workers.items() if worker.host.live_requests]
        await cluster.kill(busy)
        await cluster.forget(busy)
        summary = await stream.finished()
        assert summary.migrations == 1
        assert summary.prefill_worker not in (None, busy)
        assert len(stream.tokens[0]) == 8

    simulate(deployment(), story)


def test_a_decode_worker_killed_in_mid_stream_costs_the_client_a_moment_and_no_token() -> None:
    async def story(cluster: Cluster) -> None:
        sampling = Sampling(max_tokens=500, temperature=0.0, ignore_eos=True)
        undisturbed = cluster.submit(range(64), sampling)
        await undisturbed.finished()
        stream = cluster.submit(range(64), sampling)
        await stream.started.wait()
        (busy,) = [w for w, worker in cluster.workers.items() if worker.host.live_requests]
        await cluster.kill(busy)
        summary = await stream.finished()
        assert (summary.migrations, summary.decode_worker == busy) == (1, False)
        assert stream.tokens == undisturbed.tokens
        assert (summary.usage.prompt_tokens, summary.usage.output_tokens) == (64, 500)

    simulate(deployment(), story)


def test_a_worker_that_discovery_drops_gets_nothing_new_and_ends_its_streams() -> None:
    async def story(cluster: Cluster) -> None:
        stream = cluster.submit(range(64), Sampling(max_tokens=100, temperature=0.0, ignore_eos=True))
        await stream.started.wait()
        (busy,) = [w for w, worker in cluster.workers.items() if worker.host.live_requests]
        await cluster.forget(busy)
        await cluster.clock.sleep(0.01)
        states = {view.worker_id: view.state for view in cluster.router.workers()}
        assert states[busy] == "draining"
        other = await cluster.submit(range(64)).finished()
        assert other.decode_worker != busy
        summary = await stream.finished()
        assert summary.decode_worker == busy
        await cluster.clock.sleep(0.01)
        assert busy not in {view.worker_id for view in cluster.router.workers()}

    simulate(deployment(), story)


def test_a_worker_that_drains_by_itself_ends_its_streams_and_nobody_fails() -> None:
    async def story(cluster: Cluster) -> None:
        streams = [cluster.submit(range(i, 64 + i)) for i in range(8)]
        await streams[0].started.wait()
        victim = cluster.workers["decode-2"]
        assert await victim.host.drain("upgrade", 10.0)
        streams += [cluster.submit(range(i, 64 + i)) for i in range(8)]
        for stream in streams:
            assert (await stream.finished()).outcome == "ok"

    simulate(deployment(), story)


@pytest.mark.parametrize(
    ("odd", "shown"),
    [
        ({"block_size": 32}, "kv.block_size: 32 != 16"),
        ({"kv_dtype": "fp8"}, "kv.dtype: fp8 != auto"),
        (SimModel(kv_layout="reversed"), "kv.layout: reversed != sim"),
    ],
    ids=["block size", "dtype", "layout"],
)
def test_a_worker_of_other_kv_is_refused_with_both_sides_shown(
    odd: dict[str, object] | SimModel, shown: str
) -> None:
    async def story(cluster: Cluster) -> None:
        model = odd if isinstance(odd, SimModel) else None
        if isinstance(odd, dict):
            decode = cluster.deployment.pool("decode")
            engine = decode.engine.model_copy(update=odd)
            pools = (cluster.deployment.pool("prefill"), decode.model_copy(update={"engine": engine}))
            cluster.deployment = cluster.deployment.model_copy(update={"pools": pools})
        worker_id = (await cluster.add("decode", model)).endpoint.worker_id
        await cluster.clock.sleep(0.1)
        refused = {view.worker_id: view for view in cluster.router.workers()}[worker_id]
        assert refused.state == "refused"
        assert shown in refused.reason
        for _ in range(8):
            assert (await cluster.submit(range(64)).finished()).decode_worker != worker_id
        for peer in ("prefill-0", "prefill-1", "decode-2", "decode-3"):
            await cluster.kill(peer)
        await cluster.forget("prefill-0")
        await cluster.clock.sleep(5.0)
        assert {view.worker_id: view for view in cluster.router.workers()}[worker_id].state == "ready"

    simulate(deployment(), story)


def test_two_revisions_of_one_model_never_serve_together() -> None:
    async def story(cluster: Cluster) -> None:
        model = cluster.deployment.model.model_copy(update={"revision": "v2"})
        cluster.deployment = cluster.deployment.model_copy(update={"model": model})
        worker_id = (await cluster.add("decode")).endpoint.worker_id
        await cluster.clock.sleep(0.1)
        refused = {view.worker_id: view for view in cluster.router.workers()}[worker_id]
        assert refused.state == "refused"
        assert "revision: v2 != main" in refused.reason

    simulate(deployment(), story)


async def _cut_now_and_then(cluster: Cluster, rng: Random, times: int) -> int:
    cuts = 0
    for _ in range(times):
        await cluster.clock.sleep(rng.random() * 0.2)
        cuts += cluster.network.cut(rng.choice(sorted(cluster.workers)))
    return cuts


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_with_connection_cuts_ends_with_every_stream_whole(seed: int) -> None:
    async def story(cluster: Cluster) -> None:
        rng = Random(seed)
        families = [prompt(rng, 300) for _ in range(4)]
        cutter = asyncio.create_task(_cut_now_and_then(cluster, rng, 25))
        streams: list[tuple[ClientStream, int]] = []
        for _ in range(120):
            length = rng.randrange(1, 60)
            tokens = rng.choice(families)[: rng.randrange(1, 300)] + prompt(rng, rng.randrange(0, 30))
            sampling = Sampling(max_tokens=length, temperature=0.0, ignore_eos=True)
            streams.append((cluster.submit(tokens, sampling), length))
            await cluster.clock.sleep(rng.random() * 0.03)
            cluster.check()
        for stream, length in streams:
            summary = await stream.finished()
            assert summary.retries == 0, "a cut connection is no reason to run anything again"
            assert len(stream.tokens[0]) == length
        assert await cutter > 10

    cluster = simulate(deployment(disaggregation=["always", "auto"][seed % 2], both=seed % 2), story, seed)
    assert len(cluster.summaries) == 120


@pytest.mark.parametrize("seed", range(6))
def test_random_kills_and_cancels_leave_nothing_behind(seed: int) -> None:
    async def story(cluster: Cluster) -> None:
        rng = Random(seed)
        for round_ in range(12):
            streams = [cluster.submit(prompt(rng, rng.randrange(1, 800))) for _ in range(6)]
            await cluster.clock.sleep(rng.random() * 0.08)
            cluster.router.cancel(rng.choice(streams).request.request_id)
            if round_ % 3 == 0:
                victim = rng.choice(sorted(cluster.workers))
                pool = cluster.workers[victim].endpoint.pool
                await cluster.kill(victim)
                await cluster.forget(victim)
                await cluster.add(pool)
            cluster.check()

    cluster = simulate(deployment(), story, seed)
    outcomes = [summary.outcome for summary in cluster.summaries]
    assert len(outcomes) == len({summary.request_id for summary in cluster.summaries}) == 72
    assert set(outcomes) <= {"ok", "client_closed", "worker_lost"}
