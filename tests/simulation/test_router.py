"""The production router, sessions and wire machinery in front of simulated engines, in virtual time."""

from __future__ import annotations

from random import Random

import pytest

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import CapacityError, RequestError
from kvasir.core.requests import Sampling
from kvasir.ports.router import RequestSummary
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_platform.sim.stories import BLOCK, simulate
from kvasir_platform.sim.stories import small_deployment as deployment


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
        # An engine computes the last prompt token again: of a prompt of one block nothing can be hit.
        if length > BLOCK:
            assert second.prefill_worker == first.prefill_worker
            assert second.decode_worker == first.decode_worker
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
