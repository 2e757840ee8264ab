"""The production router, sessions and wire machinery in front of simulated engines, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from kvasir.config.spec import Deployment, EngineSpec, PoolSpec, RoutingSpec, SimSpec, WorkerSpec
from kvasir.core.errors import CapacityError, RequestError, UpstreamError
from kvasir.core.requests import Role, Sampling
from kvasir.ports.router import RequestSummary
from kvasir_platform.sim.cluster import Cluster, Stream
from kvasir_platform.sim.virtual_loop import VirtualClock, run_virtual

BLOCK = 16


def deployment(
    prefill: int = 2,
    decode: int = 2,
    both: int = 0,
    disaggregation: str = "always",
    **routing: Any,
) -> Deployment:
    engine = EngineSpec(
        kind="sim",
        block_size=BLOCK,
        kv_cache_bytes=32 << 20,
        sim=SimSpec(prefill_tokens_per_s=20_000.0, decode_step_s=0.004),
    )
    pools = [
        PoolSpec(name=name, role=role, replicas=count, engine=engine)
        for name, role, count in (
            ("prefill", Role.PREFILL, prefill),
            ("decode", Role.DECODE, decode),
            ("both", Role.BOTH, both),
        )
        if count
    ]
    return Deployment.model_validate(
        {
            "disaggregation": disaggregation,
            "pools": tuple(pools),
            "routing": RoutingSpec(**routing),
            "worker": WorkerSpec(resume_window_s=2.0),
        }
    )


def simulate(spec: Deployment, story: Callable[[Cluster], Awaitable[None]], seed: int = 0) -> Cluster:
    """Run `story` on a started cluster, bring it to rest and close it."""

    async def main() -> Cluster:
        cluster = Cluster(spec, VirtualClock(), seed=seed)
        await cluster.start()
        await story(cluster)
        await cluster.rest()
        await cluster.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert not tasks, f"left running: {tasks}"
        return cluster

    return run_virtual(main())


def without_workers(spec: Deployment) -> Deployment:
    pools = tuple(pool.model_copy(update={"replicas": 0}) for pool in spec.pools)
    return spec.model_copy(update={"pools": pools})


def ttft(summary: RequestSummary) -> float:
    assert summary.first_token_s is not None
    return summary.first_token_s - summary.arrival_s


def prompt(rng: Random, length: int) -> list[int]:
    return [rng.randrange(4000) for _ in range(length)]


def test_a_request_is_prefilled_and_decoded_apart() -> None:
    async def story(cluster: Cluster) -> None:
        stream = cluster.submit(range(100))
        summary = await stream.finished()
        assert summary.outcome == "ok"
        assert str(summary.prefill_worker).startswith("prefill")
        assert str(summary.decode_worker).startswith("decode")
        assert summary.usage.prompt_tokens == 100
        assert summary.usage.output_tokens == len(stream.tokens[0]) == 8
        assert summary.usage.transferred_bytes > 0
        assert stream.last is not None
        assert stream.last.usage == summary.usage

    simulate(deployment(), story)


@pytest.mark.parametrize("length", [16, 33, 64, 100, 640])
def test_a_second_request_with_the_same_prefix_goes_to_the_same_workers_and_hits(length: int) -> None:
    async def story(cluster: Cluster) -> None:
        first = await cluster.submit(range(length)).finished()
        second = await cluster.submit(range(length)).finished()
        assert first.predicted_cached_tokens == first.usage.cached_tokens == 0
        assert (second.prefill_worker, second.decode_worker) == (first.prefill_worker, first.decode_worker)
        assert second.predicted_cached_tokens == second.usage.cached_tokens == (length - 1) // BLOCK * BLOCK
        if length > 2 * BLOCK:
            assert ttft(second) < ttft(first)

    simulate(deployment(prefill=4, decode=4), story)


def test_a_growing_conversation_stays_where_its_prefix_is_and_every_hit_was_predicted() -> None:
    async def story(cluster: Cluster) -> None:
        rng = Random(5)
        tokens, seen = prompt(rng, 200), set()
        for _ in range(6):
            stream = cluster.submit(tokens)
            summary = await stream.finished()
            seen.add(summary.prefill_worker)
            assert summary.predicted_cached_tokens == summary.usage.cached_tokens
            tokens = tokens + stream.tokens[0] + prompt(rng, 40)
        assert len(seen) == 1
        assert summary.usage.cached_tokens > 300

    simulate(deployment(prefill=3, decode=3), story)


def test_an_aggregated_request_goes_back_to_its_prefix_too() -> None:
    async def story(cluster: Cluster) -> None:
        first = await cluster.submit(range(100)).finished()
        second = await cluster.submit(range(100)).finished()
        assert first.prefill_worker is None
        assert second.decode_worker == first.decode_worker
        assert second.predicted_cached_tokens == second.usage.cached_tokens == 96

    simulate(deployment(0, 0, both=3, disaggregation="never"), story)


def test_tenants_with_other_salts_share_no_prefix() -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.submit(range(100), salt="a").finished()
        other = await cluster.submit(range(100), salt="b").finished()
        assert other.predicted_cached_tokens == other.usage.cached_tokens == 0

    simulate(deployment(1, 1), story)


def test_many_requests_of_one_prefix_at_once_are_prefilled_on_one_worker() -> None:
    async def story(cluster: Cluster) -> None:
        rng = Random(1)
        shared = prompt(rng, 2000)
        streams = [cluster.submit(shared + prompt(rng, 20)) for _ in range(12)]
        summaries = [await stream.finished() for stream in streams]
        assert len({summary.prefill_worker for summary in summaries}) == 1

    simulate(deployment(prefill=4, decode=2), story)


@pytest.mark.parametrize("shared", [0, 64])
def test_distinct_prefixes_spread_over_the_fleet_even_one_after_the_other(shared: int) -> None:
    async def story(cluster: Cluster) -> None:
        rng = Random(2)
        common, counts = prompt(rng, shared), dict[str | None, int]()
        for _ in range(40):
            summary = await cluster.submit(common + prompt(rng, 400)).finished()
            counts[summary.prefill_worker] = counts.get(summary.prefill_worker, 0) + 1
        assert len(counts) >= 3
        assert max(counts.values()) <= 20

    simulate(deployment(prefill=4, decode=2), story)


def test_several_choices_run_whole_on_one_decode_worker() -> None:
    async def story(cluster: Cluster) -> None:
        stream = cluster.submit(range(50), Sampling(n=3, max_tokens=6, seed=1, ignore_eos=True))
        assert (await stream.finished()).prefill_worker is None
        assert [len(tokens) for tokens in stream.tokens] == [6, 6, 6]

    simulate(deployment(), story)


def test_without_workers_a_request_waits_and_is_then_told_so() -> None:
    async def story(cluster: Cluster) -> None:
        assert cluster.router.not_ready_reason() == "no worker that decodes"
        stream = cluster.submit(range(10))
        with pytest.raises(CapacityError) as caught:
            await stream.finished()
        assert caught.value.code == "no_workers"
        assert caught.value.retry_after_s > 0
        assert cluster.clock.now() == pytest.approx(5.0, abs=0.1)

    simulate(without_workers(deployment(queue_timeout_s=5.0)), story)


def test_a_waiting_request_runs_as_soon_as_its_workers_have_come() -> None:
    async def story(cluster: Cluster) -> None:
        stream = cluster.submit(range(10))
        await cluster.clock.sleep(3.0)
        await cluster.add("prefill")
        await cluster.add("decode")
        summary = await stream.finished()
        assert summary.routed_s == pytest.approx(3.0, abs=0.1)

    simulate(without_workers(deployment()), story)


def test_a_request_beyond_its_deadline_ends_with_504_and_frees_its_workers() -> None:
    async def story(cluster: Cluster) -> None:
        stream = cluster.submit(range(10), Sampling(max_tokens=2000, ignore_eos=True), deadline_s=1.0)
        with pytest.raises(RequestError) as caught:
            await stream.finished()
        assert (caught.value.status, caught.value.code) == (504, "request_timeout")
        assert cluster.clock.now() == pytest.approx(stream.request.arrival_s + 1.0, abs=0.01)

    simulate(deployment(), story)


def test_a_cancelled_request_is_aborted_in_the_engine_within_200_ms_and_says_nothing_more() -> None:
    async def story(cluster: Cluster) -> None:
        stream = cluster.submit(range(10), Sampling(max_tokens=2000, ignore_eos=True))
        await stream.started.wait()
        before, count = cluster.clock.now(), len(stream.tokens[0])
        cluster.router.cancel(stream.request.request_id)
        while any(worker.host.live_requests for worker in cluster.workers.values()):
            await cluster.clock.sleep(0.001)
        assert cluster.clock.now() - before < 0.2
        assert len(stream.tokens[0]) == count
        assert not stream.ended.is_set()
        assert cluster.summaries[-1].outcome == "client_closed"

    simulate(deployment(), story)


def test_more_requests_than_allowed_are_refused_at_once() -> None:
    async def story(cluster: Cluster) -> None:
        streams = [cluster.submit(range(10)) for _ in range(3)]
        with pytest.raises(CapacityError) as caught:
            cluster.submit(range(10))
        assert caught.value.code == "no_capacity"
        for stream in streams:
            await stream.finished()

    simulate(deployment(max_in_flight=3), story)


def test_a_prefill_worker_killed_in_mid_prompt_costs_a_retry_and_no_error() -> None:
    async def story(cluster: Cluster) -> None:
        stream = cluster.submit(range(4000))
        await cluster.clock.sleep(0.05)
        (busy,) = [w for w, worker in cluster.workers.items() if worker.host.live_requests]
        await cluster.kill(busy)
        await cluster.forget(busy)
        summary = await stream.finished()
        assert summary.retries == 1
        assert summary.prefill_worker not in (None, busy)
        assert len(stream.tokens[0]) == 8

    simulate(deployment(), story)


def test_a_decode_worker_killed_in_mid_stream_ends_the_stream_with_its_name_and_no_wrong_token() -> None:
    async def story(cluster: Cluster) -> None:
        stream = cluster.submit(range(64), Sampling(max_tokens=500, temperature=0.0, ignore_eos=True))
        await stream.started.wait()
        (busy,) = [w for w, worker in cluster.workers.items() if worker.host.live_requests]
        await cluster.kill(busy)
        with pytest.raises(UpstreamError) as caught:
            await stream.finished()
        assert caught.value.code == "worker_lost"
        assert busy in caught.value.message

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


def test_a_worker_of_another_block_size_is_refused_with_both_sides_shown() -> None:
    async def story(cluster: Cluster) -> None:
        engine = cluster.deployment.pool("decode").engine.model_copy(update={"block_size": 32})
        odd = cluster.deployment.pool("decode").model_copy(update={"engine": engine})
        pools = (cluster.deployment.pool("prefill"), odd)
        cluster.deployment = cluster.deployment.model_copy(update={"pools": pools})
        worker = await cluster.add("decode")
        await cluster.clock.sleep(0.1)
        views = {view.worker_id: view for view in cluster.router.workers()}
        refused = views[worker.endpoint.worker_id]
        assert refused.state == "refused"
        assert "kv.block_size: 32 != 16" in refused.reason
        for worker_id in ("prefill-0", "prefill-1", "decode-2", "decode-3"):
            await cluster.kill(worker_id)
        await cluster.forget("prefill-0")
        await cluster.clock.sleep(5.0)
        views = {view.worker_id: view for view in cluster.router.workers()}
        assert views[worker.endpoint.worker_id].state == "ready"

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
        streams: list[tuple[Stream, int]] = []
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


def test_a_closing_router_ends_every_request_and_frees_the_workers_at_once() -> None:
    async def main() -> None:
        cluster = Cluster(deployment(), VirtualClock())
        await cluster.start()
        streams = [cluster.submit(range(10), Sampling(max_tokens=2000, ignore_eos=True)) for _ in range(4)]
        await streams[-1].started.wait()
        before = cluster.clock.now()
        await cluster.router.close()
        assert cluster.clock.now() - before < 0.5
        assert [stream.error.code for stream in streams if stream.error] == ["shutting_down"] * 4
        assert not any(worker.host.live_requests for worker in cluster.workers.values())
        with pytest.raises(CapacityError):
            cluster.submit(range(10))
        await cluster.close()

    run_virtual(main())


def test_the_same_seed_gives_the_same_history() -> None:
    async def story(cluster: Cluster) -> None:
        rng = Random(9)
        streams = [cluster.submit(prompt(rng, rng.randrange(1, 500))) for _ in range(30)]
        for stream in streams:
            await stream.finished()

    first, second = simulate(deployment(), story, 3), simulate(deployment(), story, 3)
    assert first.summaries == second.summaries
