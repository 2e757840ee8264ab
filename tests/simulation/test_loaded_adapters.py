"""Adapters that are loaded at run time: where they are, who is routed to them, and what brings them back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvasir.config.spec.deployment import Deployment, LoraLoadingSpec
from kvasir.core.errors import CapacityError, RequestError
from kvasir.core.requests import Sampling
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.stories import simulate, small_deployment
from kvasir_router.adapters.control import RETRY_S, SETTLE_S
from kvasir_router.shell import Router

SOURCE = "/adapters/sql"
LONG = Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)


def deployment(prefill: int = 2, decode: int = 2, **loading: object) -> Deployment:
    spec = LoraLoadingSpec.model_validate({"allow": ("/adapters",), "timeout_s": 30.0, **loading})
    return small_deployment(prefill, decode).model_copy(update={"lora_loading": spec})


def holders(router: Router, name: str = "sql") -> set[str]:
    return {
        view.worker_id
        for view in router.workers()
        if any(held.name == name and not held.retiring for held in view.adapters)
    }


def key_of(router: Router, name: str = "sql") -> str:
    return router.adapters.served()[name].key


async def until(cluster: Cluster, condition: Callable[[], bool], within_s: float = 60.0) -> None:
    ends = cluster.clock.now() + within_s
    while not condition():
        assert cluster.clock.now() < ends, {
            view.worker_id: view.adapters for view in cluster.router.workers()
        }
        await cluster.clock.sleep(0.05)


def test_an_adapter_is_loaded_everywhere_known_to_every_router_and_says_something_else() -> None:
    async def story(cluster: Cluster) -> None:
        second = cluster.routers[cluster.add_router()].router
        await cluster.ready()
        assert cluster.router.adapters.served() == {}
        workers = await cluster.router.adapters.load(None, "sql", SOURCE, 0)
        assert set(workers) == set(cluster.workers) == holders(cluster.router)
        await until(cluster, lambda: "sql" in second.adapters.served())
        assert key_of(second) == key_of(cluster.router)
        plain, adapted = cluster.submit(range(64)), cluster.submit(range(64), adapter=key_of(second))
        await plain.finished()
        summary = await adapted.finished()
        assert summary.outcome == "ok"
        assert (summary.prefill_worker, summary.predicted_cached_tokens) != (None, 64)
        assert adapted.tokens != plain.tokens

    simulate(deployment(), story)


def test_a_subset_of_each_pool_holds_it_and_only_these_workers_get_its_requests() -> None:
    async def story(cluster: Cluster) -> None:
        chosen = await cluster.router.adapters.load(None, "sql", SOURCE, 1)
        assert sorted(worker_id.split("-")[0] for worker_id in chosen) == ["decode", "prefill"]
        key = key_of(cluster.router)
        streams = [cluster.submit(range(at, 64 + at), adapter=key) for at in range(12)]
        ends = [await stream.finished() for stream in streams]
        assert {end.outcome for end in ends} == {"ok"}
        assert {end.prefill_worker for end in ends} | {end.decode_worker for end in ends} == set(chosen)
        # The next adapter goes to the workers with the fewest.
        assert set(await cluster.router.adapters.load(None, "poems", "/adapters/poems", 1)).isdisjoint(chosen)

    simulate(deployment(), story)


def test_it_is_not_offered_without_a_complete_path_and_again_when_there_is_one() -> None:
    async def story(cluster: Cluster) -> None:
        chosen = await cluster.router.adapters.load(None, "sql", SOURCE, 1)
        (decode,) = [worker_id for worker_id in chosen if worker_id.startswith("decode")]
        await cluster.kill(decode)
        await cluster.forget(decode)
        await until(cluster, lambda: "sql" not in cluster.router.adapters.served(), SETTLE_S / 2)
        await until(cluster, lambda: "sql" in cluster.router.adapters.served())
        (left,) = [worker_id for worker_id in cluster.workers if worker_id.startswith("decode")]
        assert left in holders(cluster.router)
        end = await cluster.submit(range(64), adapter=key_of(cluster.router)).finished()
        assert (end.outcome, end.decode_worker) == ("ok", left)

    simulate(deployment(), story)


def test_a_worker_that_joins_loads_it_also_if_the_router_was_restarted_meanwhile() -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.router.adapters.load(None, "sql", SOURCE, 0)
        key = key_of(cluster.router)
        await cluster.restart_router()
        await until(cluster, lambda: "sql" in cluster.router.adapters.served())
        assert key_of(cluster.router) == key
        joined = (await cluster.add("decode")).endpoint.worker_id
        await until(cluster, lambda: joined in holders(cluster.router))
        assert holders(cluster.router) == set(cluster.workers)

    simulate(deployment(), story)


def test_unloading_refuses_new_requests_at_once_and_waits_for_those_that_run() -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.router.adapters.load(None, "sql", SOURCE, 0)
        key = key_of(cluster.router)
        running = [cluster.submit(range(at, 64 + at), LONG, adapter=key) for at in range(4)]
        await asyncio.gather(*(stream.started.wait() for stream in running))
        unloading = asyncio.ensure_future(cluster.router.adapters.unload("sql"))
        await until(cluster, lambda: "sql" not in cluster.router.adapters.served(), 0.5)
        assert not unloading.done()
        assert {(await stream.finished()).outcome for stream in running} == {"ok"}
        assert set(await unloading) == set(cluster.workers)
        assert all(view.adapters == () for view in cluster.router.workers())
        with pytest.raises(RequestError) as caught:
            await cluster.router.adapters.unload("sql")
        assert (caught.value.status, caught.value.code) == (404, "adapter_not_found")
        await cluster.clock.sleep(2 * SETTLE_S + RETRY_S)
        assert holders(cluster.router) == set()

    simulate(deployment(), story)


def test_a_name_given_to_other_weights_shares_no_prefix_with_the_earlier_ones() -> None:
    async def story(cluster: Cluster) -> None:
        tokens = []
        for source in (SOURCE, "/adapters/other"):
            await cluster.router.adapters.load(None, "sql", source, 0)
            key = key_of(cluster.router)
            await cluster.submit(range(256), adapter=key).finished()
            again = cluster.submit(range(256), adapter=key)
            assert (await again.finished()).usage.cached_tokens > 0
            tokens.append(again.tokens)
            await cluster.router.adapters.unload("sql")
        await cluster.router.adapters.load(None, "sql", "/adapters/third", 0)
        fresh = cluster.submit(range(256), adapter=key_of(cluster.router))
        assert (await fresh.finished()).usage.cached_tokens == 0
        assert tokens[0] != tokens[1]

    simulate(deployment(), story)


@pytest.mark.parametrize(
    ("name", "source", "status", "code"),
    [
        ("sql", "/elsewhere/sql", 403, "adapter_source_not_allowed"),
        ("sql", "/adapters/../secrets", 400, "invalid_value"),
        ("a b", SOURCE, 400, "invalid_value"),
        ("kvasir-tiny", SOURCE, 409, "adapter_exists"),
        ("held", SOURCE, 409, "adapter_exists"),
        ("sql", "/adapters/missing", 400, "adapter_unreadable"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_its_code_and_leaves_nothing(
    name: str, source: str, status: int, code: str
) -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.router.adapters.load(None, "held", "/adapters/held", 0)
        with pytest.raises(RequestError) as caught:
            await cluster.router.adapters.load(None, name, source, 0)
        assert (caught.value.status, caught.value.code) == (status, code)
        assert set(cluster.router.adapters.served()) == {"held"}
        assert holders(cluster.router, "sql") == set()

    simulate(deployment(), story)


def test_full_workers_and_pools_without_workers_are_refused_before_anything_is_loaded() -> None:
    async def story(cluster: Cluster) -> None:
        with pytest.raises(CapacityError, match="Pool prefill has 2 ready workers, and the adapter needs 3"):
            await cluster.router.adapters.load(None, "sql", SOURCE, 3)
        await cluster.router.adapters.load(None, "sql", SOURCE, 0)
        with pytest.raises(RequestError, match=r"raise lora_loading\.max_adapters \(1\)") as caught:
            await cluster.router.adapters.load(None, "poems", "/adapters/poems", 0)
        assert caught.value.code == "adapter_limit"

    simulate(deployment(max_adapters=1), story)


def test_an_adapter_is_not_unloaded_behind_the_back_of_a_worker_that_cannot_be_reached() -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.router.adapters.load(None, "sql", SOURCE, 0)
        cluster.network.cut("decode-2")
        cluster.network.unlisten("decode-2")
        away = {"interrupted", "connecting"}

        def state() -> str:
            views = {view.worker_id: view.state for view in cluster.router.workers()}
            return views["decode-2"]

        await until(cluster, lambda: state() in away, 1.0)
        with pytest.raises(CapacityError, match="decode-2 holds the adapter 'sql'") as caught:
            await cluster.router.adapters.unload("sql")
        assert caught.value.code == "adapter_unreachable"
        assert holders(cluster.router) >= {"prefill-0", "decode-3"}
        host = cluster.workers["decode-2"].host
        cluster.network.listen("decode-2", host.serve, host.snapshot)
        await until(cluster, lambda: state() == "ready")
        assert len(await cluster.router.adapters.unload("sql")) == 4

    simulate(deployment(), story)


def test_a_load_that_takes_too_long_is_reported_and_goes_on() -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.router.adapters.load(None, "sql", SOURCE, 0)
        stream = cluster.submit(
            range(64),
            Sampling(max_tokens=900, temperature=0.0, ignore_eos=True),
            adapter=key_of(cluster.router),
        )
        await stream.started.wait()
        with pytest.raises(RequestError) as caught:
            await cluster.router.adapters.unload("sql")
        assert (caught.value.status, caught.value.code) == (504, "adapter_timeout")
        await stream.finished()
        await until(cluster, lambda: all(view.adapters == () for view in cluster.router.workers()))

    simulate(deployment(timeout_s=1.5), story)


def test_where_no_source_is_allowed_nothing_is_loaded() -> None:
    async def story(cluster: Cluster) -> None:
        with pytest.raises(RequestError) as caught:
            await cluster.router.adapters.load(None, "sql", SOURCE, 0)
        assert (caught.value.status, caught.value.code) == (403, "adapter_loading_disabled")

    simulate(small_deployment(), story)
