"""A drain requested from one router: where requests go, and what every router shows."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from kvasir.core.errors import RequestError, UpstreamError
from kvasir.core.requests import Sampling
from kvasir_platform.sim.cluster import TOKENIZER_DIGEST, Cluster
from kvasir_platform.sim.stories import simulate, small_deployment
from kvasir_router.build import make_router
from kvasir_router.shell import Router
from kvasir_workers.engines.sim.model import SimModel

LONG = Sampling(max_tokens=300, temperature=0.0, ignore_eos=True)


def states(router: Router) -> dict[str, tuple[str, str]]:
    return {view.worker_id: (view.state, view.reason) for view in router.workers()}


async def until(cluster: Cluster, router: Router, worker_id: str, state: str) -> None:
    for _ in range(1000):
        if states(router).get(worker_id, ("", ""))[0] == state:
            return
        await cluster.clock.sleep(0.01)
    raise AssertionError(f"{worker_id} is not {state}: {states(router)}")


def test_a_worker_drained_through_one_router_gets_nothing_from_another_and_ends_its_streams() -> None:
    async def story(cluster: Cluster) -> None:
        second = make_router(
            cluster.deployment,
            tokenizer_digest=TOKENIZER_DIGEST,
            discovery=cluster.discovery,
            dialer=cluster.network,
            clock=cluster.clock,
            rng=Random(5),
            router_id="second",
        )
        running = asyncio.ensure_future(second.run())
        await cluster.clock.sleep(0.1)
        streams = [cluster.submit(range(i, 64 + i), LONG) for i in range(4)]
        await asyncio.gather(*(stream.started.wait() for stream in streams))
        second.drain("decode-2", True, "kernel update")
        await until(cluster, cluster.router, "decode-2", "draining")
        await until(cluster, second, "decode-2", "draining")
        assert states(cluster.router)["decode-2"] == ("draining", "kernel update")
        later = [cluster.submit(range(i, 64 + i)) for i in range(8)]
        assert {(await stream.finished()).decode_worker for stream in later} == {"decode-3"}
        ended = [await stream.finished() for stream in streams]
        assert {summary.decode_worker for summary in ended} == {"decode-2", "decode-3"}
        assert all(summary.outcome == "ok" and summary.retries == 0 for summary in ended)
        cluster.router.drain("decode-2", False)
        await until(cluster, cluster.router, "decode-2", "ready")
        await until(cluster, second, "decode-2", "ready")
        again = [cluster.submit(range(i, 64 + i)) for i in range(8)]
        assert "decode-2" in {(await stream.finished()).decode_worker for stream in again}
        await second.close()
        await running

    simulate(small_deployment(), story)


def test_an_unknown_worker_is_refused_with_those_that_are_known() -> None:
    async def story(cluster: Cluster) -> None:
        with pytest.raises(RequestError) as caught:
            cluster.router.drain("decode-9", True)
        assert (caught.value.status, caught.value.code) == (404, "worker_not_found")
        assert caught.value.message == "There is no worker 'decode-9' here; there are: both-0, both-1."

    simulate(small_deployment(0, 0, 2, "never"), story)


def test_a_worker_without_a_session_cannot_be_told_and_the_caller_learns_it() -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.kill("both-0")
        await until(cluster, cluster.router, "both-0", "connecting")
        with pytest.raises(UpstreamError, match="both-0 cannot be reached") as caught:
            cluster.router.drain("both-0", True)
        assert caught.value.code == "session_lost"

    simulate(small_deployment(0, 0, 2, "never"), story)


def test_a_drain_of_a_worker_that_does_not_fit_holds_when_it_is_taken_in() -> None:
    async def story(cluster: Cluster) -> None:
        odd = (await cluster.add("both", SimModel(kv_layout="reversed"))).endpoint.worker_id
        await until(cluster, cluster.router, odd, "refused")
        cluster.router.drain(odd, True, "not yet")
        for peer in ("both-0", "both-1"):
            await cluster.kill(peer)
            await cluster.forget(peer)
        await until(cluster, cluster.router, odd, "draining")
        assert states(cluster.router)[odd] == ("draining", "not yet")

    simulate(small_deployment(0, 0, 2, "never"), story)


def test_a_worker_that_stops_is_not_taken_in_again_when_a_peer_leaves() -> None:
    async def story(cluster: Cluster) -> None:
        stopping = cluster.workers["both-0"]
        assert await stopping.host.drain("scale-down", 1.0)
        await stopping.host.close()
        await until(cluster, cluster.router, "both-0", "refused")
        await cluster.kill("both-1")
        await cluster.forget("both-1")
        await cluster.clock.sleep(0.1)
        assert states(cluster.router)["both-0"] == ("refused", "the worker is stopping")
        assert cluster.router.not_ready_reason() is not None

    simulate(small_deployment(0, 0, 2, "never"), story)
