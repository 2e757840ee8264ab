"""Several models behind one router port, each with its own workers."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from kvasir.config.spec.deployment import (
    Deployment,
    EngineSpec,
    FurtherModelSpec,
    ModelSpec,
    PoolScalingSpec,
    PoolSpec,
    SimSpec,
)
from kvasir.core.errors import CapacityError, RequestError
from kvasir.core.locality import NOWHERE, Locality, Nic, NicProtocol
from kvasir.core.membership import Endpoint
from kvasir.core.requests import Request, Role, Sampling, Task, token_ids
from kvasir.ports.clock import Clock
from kvasir.ports.engine import Engine
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_platform.sim.net.discovery import FeedDiscovery
from kvasir_platform.sim.net.transport import MemoryNetwork
from kvasir_router.build import EdgeFacts, make_routers
from kvasir_router.mux import RouterMux
from kvasir_workers.engines.sim.embedding import SimEmbeddingEngine, simulated_embedding
from kvasir_workers.engines.sim.engine import SimEngine
from kvasir_workers.server.sessions import SessionHost, SessionHostLimits

DIGEST = "simulated"
ENGINE = EngineSpec(kind="sim", max_num_seqs=4, max_num_batched_tokens=64, sim=SimSpec(decode_step_s=0.01))


def spec(**changes: object) -> Deployment:
    pools = (
        PoolSpec(name="first", role=Role.BOTH, engine=ENGINE),
        PoolSpec(name="second", role=Role.BOTH, engine=ENGINE, model="another"),
        PoolSpec(name="vectors", role=Role.EMBED, engine=ENGINE, model="embedder", replicas=2),
    )
    models = (FurtherModelSpec(name="another"), FurtherModelSpec(name="embedder", max_model_len=128))
    base = Deployment(model=ModelSpec(served_name="one"), models=models, disaggregation="never", pools=pools)
    return base.model_copy(update=changes)


@dataclass
class Fleet:
    """Sim workers behind a memory network, and the port in front of them."""

    deployment: Deployment
    clock: Clock
    discovery: FeedDiscovery = field(default_factory=FeedDiscovery)
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    hosts: dict[str, SessionHost] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)
    requests: int = 0

    def open(self) -> None:
        facts = {view.model.name: EdgeFacts(DIGEST) for view in self.deployment.views()}
        made = make_routers(
            self.deployment,
            facts,
            discovery=self.discovery,
            dialer=self.network,
            clock=self.clock,
            rng=Random(1),
            router_id="router",
        )
        assert isinstance(made, RouterMux)
        self.router = made
        self.running = asyncio.create_task(made.run())

    async def add(self, pool_name: str, reported: Locality = NOWHERE, found: Locality = NOWHERE) -> str:
        view = self.deployment.view_of(pool_name)
        pool = view.pool(pool_name)
        kind = SimEmbeddingEngine if pool.role is Role.EMBED else SimEngine
        engine = kind(view, pool, clock=self.clock, tokenizer_digest=DIGEST)
        worker_id = f"{pool_name}-{len(self.hosts)}"
        host = await SessionHost.start(
            engine,
            worker_id=worker_id,
            epoch=1,
            clock=self.clock,
            limits=SessionHostLimits(),
            locality=reported,
        )
        self.network.listen(worker_id, host.serve, host.snapshot, None)
        self.hosts[worker_id], self.engines[worker_id] = host, engine
        endpoint = Endpoint(worker_id, worker_id, pool_name, found)
        await self.discovery.put(*self.discovery.endpoints, endpoint)
        return worker_id

    async def lose(self, worker_id: str) -> None:
        """Take the worker away without notice."""
        await self.hosts[worker_id].close()
        await self.engines[worker_id].stop()
        left = [each for each in self.discovery.endpoints if each.worker_id != worker_id]
        await self.discovery.put(*left)
        while any(view.worker_id == worker_id for view in self.router.workers()):
            await self.clock.sleep(0.01)

    async def until_ready(self, workers: int) -> None:
        for _ in range(1000):
            if sum(view.state == "ready" for view in self.router.workers()) == workers:
                return
            await self.clock.sleep(0.01)
        raise AssertionError([(view.worker_id, view.state, view.reason) for view in self.router.workers()])

    def submit(self, model: str, length: int = 20, task: Task = Task.GENERATE) -> ClientStream:
        self.requests += 1
        request = Request(
            f"r{self.requests}",
            model,
            token_ids(range(length)),
            Sampling(max_tokens=8, temperature=0.0, ignore_eos=True),
            arrival_s=self.clock.now(),
            task=task,
        )
        stream = ClientStream(request)
        self.router.submit(request, stream)
        return stream

    async def close(self) -> None:
        await self.discovery.close()
        await self.router.close()
        await self.running
        for host in self.hosts.values():
            await host.close()
        await self.network.close()
        for engine in self.engines.values():
            await engine.stop()


def tell(story: Callable[[Fleet], Awaitable[None]], deployment: Deployment | None = None) -> None:
    async def run() -> None:
        fleet = Fleet(deployment or spec(), VirtualClock())
        fleet.open()
        await story(fleet)
        fleet.router.validate_state()
        await fleet.close()

    run_virtual(run())


def test_each_model_is_served_by_its_own_workers() -> None:
    async def story(fleet: Fleet) -> None:
        for pool in ("first", "second", "vectors"):
            await fleet.add(pool)
        await fleet.until_ready(3)
        one, another = fleet.submit("one"), fleet.submit("another")
        vector = fleet.submit("embedder", task=Task.EMBED)
        assert fleet.router.in_flight == fleet.router.accounting().in_flight == 3
        assert (await one.finished()).decode_worker == "first-0"
        assert (await another.finished()).decode_worker == "second-1"
        assert (await vector.finished()).prefill_worker == "vectors-2"
        assert vector.last is not None
        assert vector.last.embedding == simulated_embedding(token_ids(range(20)))
        assert [view.worker_id for view in fleet.router.workers()] == ["first-0", "second-1", "vectors-2"]
        assert fleet.router.accounting().consistent

    tell(story)


def test_a_worker_is_shown_where_it_says_that_it_is_and_else_where_discovery_finds_it() -> None:
    async def story(fleet: Fleet) -> None:
        nic = Nic("mlx5_0", NicProtocol.RDMA, 400_000_000_000)
        await fleet.add("first", Locality("n1", "z1", "r1", "d1", (nic,)), Locality("n9", "z9"))
        await fleet.add("second", Locality(rack="r2"), Locality("n2", "z2"))
        await fleet.until_ready(2)
        identities = [view.identity for view in fleet.router.workers()]
        assert [identity and identity.locality for identity in identities] == [
            Locality("n1", "z1", "r1", "d1", (nic,)),
            Locality("n2", "z2", "r2"),
        ]

    tell(story)


def test_a_model_that_is_not_there_is_refused() -> None:
    async def story(fleet: Fleet) -> None:
        with pytest.raises(RequestError) as caught:
            fleet.submit("nobody")
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")

    tell(story)


def test_it_is_ready_when_every_model_is_and_says_which_is_not() -> None:
    async def story(fleet: Fleet) -> None:
        await fleet.add("first")
        await fleet.add("vectors")
        await fleet.until_ready(2)
        assert fleet.router.not_ready_reason() == "another: no worker of role both"
        assert fleet.router.not_ready_models() == {
            "one": None,
            "another": "no worker of role both",
            "embedder": None,
        }
        await fleet.add("second")
        await fleet.until_ready(3)
        assert fleet.router.not_ready_reason() is None

    tell(story)


def test_it_is_ready_with_any_model_where_the_spec_says_so() -> None:
    async def story(fleet: Fleet) -> None:
        assert "embedder: no worker that embeds" in str(fleet.router.not_ready_reason())
        await fleet.add("second")
        await fleet.until_ready(1)
        assert fleet.router.not_ready_reason() is None

    tell(story, spec(ready_when="any_model"))


def test_once_ready_it_takes_requests_without_workers_until_it_stops() -> None:
    async def story(fleet: Fleet) -> None:
        assert "another: no worker of role both" in str(fleet.router.refusing_reason())
        for pool in ("first", "second", "vectors"):
            await fleet.add(pool)
        await fleet.until_ready(3)
        assert fleet.router.refusing_reason() is None
        await fleet.lose("first-0")
        assert fleet.router.not_ready_reason() == "one: no worker of role both"
        assert fleet.router.refusing_reason() is None
        waits = fleet.submit("one")
        assert (await fleet.submit("another").finished()).outcome == "ok"
        assert not waits.ended.is_set()
        await fleet.add("first")
        assert (await waits.finished()).decode_worker == "first-3"
        await fleet.lose("first-3")
        with pytest.raises(CapacityError) as caught:
            await fleet.submit("one").finished()
        assert caught.value.code == "no_workers"
        assert caught.value.retry_after_s > 0
        await fleet.router.close()
        assert fleet.router.refusing_reason() == "the router is stopping"

    tell(story)


def test_a_model_without_workers_is_ready_only_while_one_is_promised_for_it() -> None:
    def sleepy(pool: PoolSpec) -> PoolSpec:
        return pool.model_copy(update={"scaling": PoolScalingSpec(min=0, max=2)})

    async def story(fleet: Fleet) -> None:
        router = fleet.router
        router.planned({}, {"one": 30.0, "another": 30.0, "embedder": 30.0})
        assert router.not_ready_reason() is None
        router.planned({}, {"one": 30.0, "embedder": 30.0})
        assert router.not_ready_reason() == "another: no worker of role both"
        # The planner is not heard.
        router.planned({}, None)
        assert set(router.not_ready_models().values()) == {"no worker of role both", "no worker that embeds"}

    tell(story, spec(pools=tuple(map(sleepy, spec().pools))))


def test_a_cancelled_request_and_a_drained_worker_are_found_whosever_they_are() -> None:
    async def story(fleet: Fleet) -> None:
        for pool in ("first", "second", "vectors"):
            await fleet.add(pool)
        await fleet.until_ready(3)
        stream = fleet.submit("another")
        await stream.started.wait()
        assert fleet.router.explain(stream.request.request_id) is not None
        fleet.router.cancel(stream.request.request_id)
        assert fleet.router.in_flight == 0
        fleet.router.drain("vectors-2", True, "kernel update")
        await fleet.clock.sleep(0.1)
        states = {view.worker_id: view.state for view in fleet.router.workers()}
        assert states == {"first-0": "ready", "second-1": "ready", "vectors-2": "draining"}
        with pytest.raises(RequestError, match="there are: first-0, second-1, vectors-2"):
            fleet.router.drain("nobody", True)

    tell(story)


def test_inputs_are_spread_over_the_replicas_by_their_tokens() -> None:
    async def story(fleet: Fleet) -> None:
        await fleet.add("vectors")
        await fleet.add("vectors")
        await fleet.until_ready(2)
        long = fleet.submit("embedder", 100, Task.EMBED)
        short = [fleet.submit("embedder", 10, Task.EMBED) for _ in range(4)]
        beside = {(await stream.finished()).prefill_worker for stream in short}
        assert beside.isdisjoint({(await long.finished()).prefill_worker})

    tell(story)


def test_inputs_on_a_worker_whose_engine_dies_are_embedded_elsewhere() -> None:
    async def story(fleet: Fleet) -> None:
        first, other = await fleet.add("vectors"), await fleet.add("vectors")
        await fleet.until_ready(2)
        streams = [fleet.submit("embedder", 60, Task.EMBED) for _ in range(8)]
        await fleet.clock.sleep(0.001)
        dying = fleet.engines[first]
        assert isinstance(dying, SimEmbeddingEngine)
        dying.crash("out of memory")
        ended = [await stream.finished() for stream in streams]
        assert {summary.prefill_worker for summary in ended} == {other}
        assert any(summary.migrations for summary in ended)

    tell(story)


def test_more_inputs_than_are_allowed_are_refused_at_once() -> None:
    async def story(fleet: Fleet) -> None:
        fleet.submit("embedder", task=Task.EMBED)
        fleet.submit("embedder", task=Task.EMBED)
        with pytest.raises(CapacityError) as caught:
            fleet.submit("embedder", task=Task.EMBED)
        assert caught.value.code == "queue_full"
        # The other models have room of their own.
        fleet.submit("one")

    routing = spec().routing.model_copy(update={"max_in_flight": 2})
    tell(story, spec(routing=routing))


def test_a_worker_that_generates_is_not_taken_for_one_that_embeds() -> None:
    async def story(fleet: Fleet) -> None:
        view = fleet.deployment.view_of("vectors")
        pool = view.pool("vectors").model_copy(update={"role": Role.BOTH})
        engine = SimEngine(view, pool, clock=fleet.clock, tokenizer_digest=DIGEST)
        host = await SessionHost.start(
            engine, worker_id="odd", epoch=1, clock=fleet.clock, limits=SessionHostLimits()
        )
        fleet.hosts["odd"], fleet.engines["odd"] = host, engine
        fleet.network.listen("odd", host.serve, host.snapshot, None)
        await fleet.discovery.put(Endpoint("odd", "odd", "vectors"))
        await fleet.clock.sleep(0.5)
        (shown,) = fleet.router.workers()
        assert (shown.state, shown.reason) == ("refused", "role: both != embed (router)")

    tell(story)


def test_simulated_vectors_are_the_same_everywhere_and_of_length_one() -> None:
    vector = simulated_embedding(token_ids((1, 2, 3)))
    assert vector == simulated_embedding(token_ids((1, 2, 3)))
    assert vector != simulated_embedding(token_ids((1, 2, 4)))
    assert vector != simulated_embedding(token_ids((1, 2, 3)), "an-adapter")
    assert isinstance(vector, array)
    assert sum(value * value for value in vector) == pytest.approx(1.0)
