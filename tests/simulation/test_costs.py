"""Costs of whole simulated deployments in virtual time: they add up to the hours of the workers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

from kvasir.config.spec.tenants import CostSpec
from kvasir.core.requests import Request, Sampling, token_ids
from kvasir.ports.router import RequestSummary
from kvasir.ports.stores.costs import HOUR_S, CostBatch
from kvasir_platform.gateway.costs.keeper import SAMPLE_S
from kvasir_platform.gateway.costs.ledger import CostLedger
from kvasir_platform.gateway.costs.memory_store import MemoryCosts
from kvasir_platform.gateway.costs.prices import Prices
from kvasir_platform.gateway.costs.sqlite_store import SqliteCosts
from kvasir_platform.gateway.costs.statement import CostStatement, StatementLine, statement
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_platform.sim.stories import small_deployment

EPOCH = 1_900_000_800 // HOUR_S * HOUR_S - 300
"""An hour begins 300 s after the start."""
GPU, GPU_HOUR = "h100", 3.0


class Tap(list[RequestSummary]):
    """The summaries of a cluster, which a ledger gets too."""

    ledger: CostLedger | None = None
    others: dict[str, CostLedger] | None = None
    """Ledgers of further routers, by the requests that they had."""

    def append(self, summary: RequestSummary) -> None:
        ledger = (self.others or {}).get(summary.request_id, self.ledger)
        if ledger is not None:
            ledger.ended(summary)
        super().append(summary)


class Account:
    """The costs of a cluster, and the true lifetimes of its workers, or of their GPUs if they have some."""

    def __init__(self, cluster: Cluster, tap: Tap) -> None:
        clock = cluster.clock
        self.cluster = cluster
        self.store = MemoryCosts()
        self.ledger = CostLedger("router", Prices(cluster.deployment), clock.now, lambda: EPOCH + clock.now())
        self.ledger.source = cluster.router
        tap.ledger = self.ledger
        self.ledgers = {"": self.ledger}
        self._tap = tap
        self.device_s = 0.0
        self._devices = {pool.name: pool.reserved_gpus or 1.0 for pool in cluster.deployment.pools}
        self.batches: list[CostBatch] = []
        self._checked_s = clock.now()
        self._numbers = iter(range(10**6))

    def _wall(self) -> float:
        return EPOCH + self.cluster.clock.now()

    async def keep(self) -> None:
        """Sample as a router does, and measure true lifetimes much more often."""
        clock, sampled_s = self.cluster.clock, float("-inf")
        while True:
            if clock.now() - sampled_s >= SAMPLE_S:
                sampled_s = clock.now()
                for ledger in self.ledgers.values():
                    ledger.sample()
            await clock.sleep(0.5)
            devices = sum(self._devices[each.endpoint.pool] for each in self.cluster.workers.values())
            self.device_s += devices * (clock.now() - self._checked_s)
            self._checked_s = clock.now()

    def add_router(self) -> str:
        """Start one more router, with costs of its own in the same store. Return its id."""
        cluster = self.cluster
        router_id = cluster.add_router()
        ledger = CostLedger(router_id, Prices(cluster.deployment), cluster.clock.now, self._wall)
        ledger.source = cluster.routers[router_id].router
        self.ledgers[router_id] = ledger
        return router_id

    def submit(
        self, tenant: str, prompt: int, output: int, *, first: int = 0, router_id: str = ""
    ) -> ClientStream:
        number = next(self._numbers)
        start = first or 7 * number
        request = Request(
            f"r{number}-{tenant}",
            self.cluster.deployment.model.name,
            token_ids(range(start, start + prompt)),
            Sampling(max_tokens=output, temperature=0.0, ignore_eos=True),
            arrival_s=self.cluster.clock.now(),
            tenant=tenant,
            key=f"key-{tenant}",
        )
        stream = ClientStream(request)
        router = self.cluster.routers[router_id].router if router_id else self.cluster.router
        self._tap.others = (self._tap.others or {}) | {request.request_id: self.ledgers[router_id]}
        router.submit(request, stream)
        return stream

    async def statement(self, *by: str) -> CostStatement:
        for ledger in self.ledgers.values():
            ledger.sample()
            while (batch := ledger.take()) is not None:
                self.batches.append(batch)
                await self.store.add(batch)
        return statement(await self.store.read(0, EPOCH + 10**7), by)


def lines(made: CostStatement, kind: str) -> dict[str, StatementLine]:
    return {line.names.get("tenant", ""): line for line in made.lines if line.kind == kind}


def costs_of(
    story: Callable[[Account], Awaitable[None]], *, prefill: int, decode: int, gpus: float = 0.0
) -> Account:
    spec = small_deployment(prefill, decode)
    if gpus:
        pools = tuple(pool.model_copy(update={"gpus": gpus, "gpu": GPU}) for pool in spec.pools)
        spec = spec.model_copy(update={"pools": pools, "cost": CostSpec(prices={GPU: GPU_HOUR})})

    async def run() -> Account:
        tap = Tap()
        cluster = Cluster(spec, VirtualClock(), summaries=tap)
        await cluster.start()
        account = Account(cluster, tap)
        keeping = asyncio.create_task(account.keep())
        await story(account)
        keeping.cancel()
        await asyncio.wait([keeping])
        await cluster.rest()
        await cluster.close()
        return account

    return run_virtual(run())


def test_the_lines_add_up_to_the_time_of_workers_that_come_and_go_and_fail() -> None:
    made: list[CostStatement] = []
    random = Random(4)

    async def story(account: Account) -> None:
        cluster, clock = account.cluster, account.cluster.clock
        added = None
        for number in range(60):
            tenant = random.choice(["shop", "lab"])
            account.submit(tenant, random.randrange(32, 800), random.randrange(8, 60))
            await clock.sleep(random.expovariate(0.2))
            if number == 20:
                added = await cluster.add("decode")
            if number == 40 and added is not None:
                await cluster.kill(added.endpoint.worker_id)
                await cluster.forget(added.endpoint.worker_id)
        await cluster.rest()
        made.append(await account.statement("tenant", "day"))

    account = costs_of(story, prefill=1, decode=2)
    found = made[0]
    assert account.device_s > 900
    assert math.isclose(sum(line.seconds for line in found.lines), account.device_s, rel_tol=0.01)
    assert {line.kind for line in found.lines} >= {"usage", "idle"}
    assert sum(line.requests for line in found.lines) == 60
    assert all(line.seconds > 0 for line in found.lines)


def test_who_generates_more_is_charged_more_and_cached_prompts_cost_less() -> None:
    made: list[CostStatement] = []

    async def story(account: Account) -> None:
        for number in range(20):
            cold = account.submit("cold", 1600, 16, first=100_000 + 5_000 * number)
            warm = account.submit("warm", 1600, 16, first=50_000)
            long = account.submit("long", 1600, 160, first=50_000)
            await asyncio.gather(*(stream.finished() for stream in (cold, warm, long)))
        made.append(await account.statement("tenant"))

    costs_of(story, prefill=1, decode=1)
    used = lines(made[0], "usage")
    assert used["warm"].cached_tokens > 0.8 * used["warm"].prompt_tokens
    assert used["warm"].prefill_s < 0.3 * used["cold"].prefill_s
    assert math.isclose(used["warm"].decode_s, used["cold"].decode_s, rel_tol=0.5)
    assert used["long"].decode_s > 5 * used["warm"].decode_s


def test_work_that_a_lost_worker_did_in_vain_is_wasted_and_the_request_is_charged_once() -> None:
    made: list[CostStatement] = []

    async def story(account: Account) -> None:
        cluster, clock = account.cluster, account.cluster.clock
        streams = [account.submit("shop", 800, 400) for _ in range(4)]
        await clock.sleep(0.5)
        lost = next(
            view.worker_id for view in cluster.router.workers() if view.pool == "decode" and view.in_flight
        )
        await cluster.kill(lost)
        await cluster.forget(lost)
        summaries = await asyncio.gather(*(stream.finished() for stream in streams))
        assert any(summary.migrations for summary in summaries)
        made.append(await account.statement("tenant"))

    costs_of(story, prefill=1, decode=2)
    used, wasted = lines(made[0], "usage")["shop"], lines(made[0], "wasted")["shop"]
    assert (used.requests, used.prompt_tokens, used.output_tokens) == (4, 3200, 1600)
    assert 0 < wasted.seconds < used.seconds


def test_costs_of_several_routers_add_up_to_the_same_workers() -> None:
    made: list[CostStatement] = []
    random = Random(5)

    async def story(account: Account) -> None:
        cluster, clock = account.cluster, account.cluster.clock
        second = account.add_router()
        await cluster.ready()
        for _ in range(40):
            tenant, router_id = random.choice([("shop", ""), ("lab", second)])
            account.submit(tenant, random.randrange(32, 800), random.randrange(8, 60), router_id=router_id)
            await clock.sleep(random.expovariate(0.2))
        await cluster.rest()
        made.append(await account.statement("tenant"))

    account = costs_of(story, prefill=1, decode=1)
    used = lines(made[0], "usage")
    assert math.isclose(sum(line.seconds for line in made[0].lines), account.device_s, rel_tol=0.01)
    assert used["shop"].requests + used["lab"].requests == 40
    shop_s, lab_s = (used[name].seconds / used[name].requests for name in ("shop", "lab"))
    assert math.isclose(shop_s, lab_s, rel_tol=0.5)


def test_workers_with_several_gpus_are_charged_for_each_of_them() -> None:
    made: list[CostStatement] = []

    async def story(account: Account) -> None:
        for _ in range(20):
            await account.submit("shop", 400, 40).finished()
            await account.cluster.clock.sleep(10.0)
        made.append(await account.statement("tenant"))

    account = costs_of(story, prefill=1, decode=2, gpus=4.0)
    found = made[0]
    assert account.device_s > 4 * 3 * 200
    assert math.isclose(found.gpu_s, account.device_s, rel_tol=0.01)
    assert math.isclose(sum(line.seconds for line in found.lines), account.device_s, rel_tol=0.01)
    assert math.isclose(
        sum(line.cost for line in found.lines), account.device_s / 3600 * GPU_HOUR, rel_tol=0.01
    )
    used = lines(found, "usage")["shop"]
    assert math.isclose(used.cost, used.seconds / 3600 * GPU_HOUR)


def test_a_file_has_the_same_statement_whatever_is_sent_twice(tmp_path: Path) -> None:
    made: list[CostStatement] = []

    async def story(account: Account) -> None:
        for number in range(30):
            await account.submit(("shop", "lab")[number % 2], 400, 40).finished()
            await account.cluster.clock.sleep(20.0)
            if number % 10 == 9:
                made.append(await account.statement("tenant", "hour"))

    account = costs_of(story, prefill=1, decode=1)
    assert len(account.batches) >= 3

    async def kept() -> CostStatement:
        file = SqliteCosts(tmp_path / "costs.db")
        for batch in account.batches:
            await file.add(batch)
            await file.add(batch)
        await file.close()
        again = SqliteCosts(tmp_path / "costs.db")
        found = statement(await again.read(0, EPOCH + 10**7), ("tenant", "hour"))
        await again.close()
        return found

    found = asyncio.run(kept())
    assert {line.kind for line in found.lines} == {"usage", "idle"}
    assert shown(found) == shown(made[-1])


def shown(made: CostStatement) -> dict[tuple[str, ...], tuple[float, ...]]:
    return {
        (line.kind, *line.names.values()): (line.requests, round(line.seconds, 6), round(line.cost, 9))
        for line in made.lines
    }
