"""Predicted and found hits, in the production router over simulated engines and in virtual time."""

from __future__ import annotations

from random import Random

import pytest

from kvasir.config.spec.deployment import Deployment
from kvasir.core.kv import KvState, KvStatus
from kvasir.core.requests import Sampling
from kvasir.ports.router import RequestSummary
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.stories import BLOCK, simulate, small_deployment
from kvasir_router.fleet.reconcile import ReconcileLimits

PATIENCE = ReconcileLimits().patience
SOON = 2 * PATIENCE


def with_engine(spec: Deployment, **engine: object) -> Deployment:
    pools = tuple(
        pool.model_copy(update={"engine": pool.engine.model_copy(update=engine)}) for pool in spec.pools
    )
    return spec.model_copy(update={"pools": pools})


def seen(cluster: Cluster, worker_id: str) -> KvStatus:
    (kv,) = [view.kv for view in cluster.router.workers() if view.worker_id == worker_id]
    assert kv is not None
    return kv


async def turns(cluster: Cluster, count: int, seed: int = 1) -> list[RequestSummary]:
    """Conversations that grow by a few blocks with every turn, one request at a time."""
    rng = Random(seed)
    history: list[int] = []
    made = []
    for turn in range(count):
        if turn % 8 == 0:
            history = [rng.randrange(4000) for _ in range(10 * BLOCK)]
        history += [rng.randrange(4000) for _ in range(rng.randrange(4 * BLOCK))]
        made.append(await cluster.submit(history).finished())
    return made


def test_requests_for_several_choices_are_not_judged() -> None:
    async def story(cluster: Cluster) -> None:
        for _ in range(3):
            await cluster.submit(range(100), Sampling(max_tokens=4, n=3, ignore_eos=True)).finished()
        kvs = [view.kv for view in cluster.router.workers() if view.kv is not None]
        assert [kv.evaluated_requests for kv in kvs] == [0] * len(kvs)

    simulate(small_deployment(prefill=0, decode=0, both=1, disaggregation="never"), story)


@pytest.mark.parametrize("disaggregation", ["always", "never"])
def test_hits_of_growing_conversations_are_foreseen_to_the_token(disaggregation: str) -> None:
    async def story(cluster: Cluster) -> None:
        made = await turns(cluster, 96)
        assert all(each.predicted_cached_tokens == each.usage.cached_tokens for each in made)
        assert sum(each.usage.cached_tokens > 0 for each in made) == 84
        kvs = [view.kv for view in cluster.router.workers() if view.kv is not None]
        assert sum(kv.evaluated_requests for kv in kvs) == 84
        assert [(kv.error_ratio, kv.error_tokens) for kv in kvs] == [(0.0, 0)] * len(kvs)

    apart = disaggregation == "always"
    pools = {"prefill": 2, "decode": 1} if apart else {"prefill": 0, "decode": 0, "both": 2}
    simulate(small_deployment(**pools, disaggregation=disaggregation), story)


def test_a_worker_whose_prefix_cache_is_silently_off_is_named_and_nothing_is_foreseen_of_it() -> None:
    async def story(cluster: Cluster) -> None:
        made = await turns(cluster, SOON)
        (worker_id,) = {str(each.prefill_worker) for each in made}
        kv = seen(cluster, worker_id)
        assert kv.state is KvState.PREDICTED
        assert "predicted and found cached tokens differ by " in kv.reason
        assert "0 found in each; it appears to cache nothing" in kv.reason
        assert kv.error_ratio > 0.5
        assert kv.error_tokens > 1000
        misled = [each.predicted_cached_tokens > 0 for each in made]
        assert sum(misled) == PATIENCE
        assert not any(misled[-8:])

    spec = small_deployment(prefill=1, decode=1)
    simulate(with_engine(spec, prefix_caching=False), story)


def test_the_next_life_of_a_demoted_worker_is_believed_again() -> None:
    async def story(cluster: Cluster) -> None:
        made = await turns(cluster, SOON)
        worker_id = str(made[0].prefill_worker)
        await cluster.kill(worker_id)
        await cluster.forget(worker_id)
        successor = await cluster.add("prefill")
        after = await turns(cluster, 9)
        assert {each.prefill_worker for each in after} == {successor.endpoint.worker_id}
        kv = seen(cluster, successor.endpoint.worker_id)
        assert "differ" not in kv.reason
        assert any(each.predicted_cached_tokens for each in after)

    spec = small_deployment(prefill=1, decode=1)
    simulate(with_engine(spec, prefix_caching=False), story)
