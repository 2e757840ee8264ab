"""Limits of a tenant over cells whose routers share a real Redis each: one bucket, one number of slots."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from tests.kit.clocks import StillClock
from tests.kit.lab.redis_server import RedisServer

from kvasir.clock import MonotonicClock
from kvasir.config.spec.redis import LimitsRedisSpec
from kvasir.ports.limits import Grant, LimitRefusal, Quota, RateLimits, SharedRateLimits
from kvasir_platform.gateway.tenants.redis_limits import RedisLimits
from kvasir_platform.regions.sharing.asks import AskCell, LimitAllotted, LimitAsk, TenantSlotAsk, TenantSlots
from kvasir_platform.regions.sharing.limits import CellLimits, home_of

CELLS = ("eu", "us")
TENANT = next(name for name in (f"t{i}" for i in range(100)) if home_of(name, CELLS) == "eu")
ROUTERS = ("eu-a", "eu-b", "us-a", "us-b")
PATIENCE_S = 30.0
Verdict = Grant | LimitRefusal


class Cells:
    """Two routers in each of two cells. Asks go to a router of the home cell, each time to the other one;
    while `apart` they are lost. The cells' time stands still, that of Redis does not."""

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self.clock = StillClock()
        self.apart = False
        self.cells: dict[str, CellLimits] = {}
        self.limits: dict[str, RateLimits] = {}
        self.stores: dict[str, RedisLimits] = {}
        self._asks = 0

    async def start(self, server: RedisServer, tasks: AsyncExitStack) -> None:
        for router in ROUTERS:
            cell = router[:2]
            spec = LimitsRedisSpec.model_validate({"url": server.url, "timeout_s": 5.0, "namespace": cell})
            store = self.stores[router] = RedisLimits(spec, MonotonicClock(), router)
            self.cells[router] = CellLimits(
                cell,
                CELLS,
                {TENANT: self.quota},
                self.clock,
                ask=self._asker(router),
                epoch=1,
                router=router,
            )
            self.limits[router] = self.cells[router].over(store)
            running = asyncio.create_task(self.limits[router].run())
            tasks.push_async_callback(_end, running)
            async with asyncio.timeout(PATIENCE_S):
                while not store.shared:
                    await asyncio.sleep(0.001)

    def _asker(self, router: str) -> AskCell:
        def ask(cell: str, ask: LimitAsk | TenantSlotAsk) -> bool:
            if self.apart:
                return True
            self._asks += 1
            home, own = self.cells[f"{cell}-{'ab'[self._asks % 2]}"], self.cells[router]

            def allotted(answer: LimitAllotted) -> None:
                own.answered(cell, answer)

            def granted(answer: TenantSlots) -> None:
                own.granted(cell, answer)

            if isinstance(ask, LimitAsk):
                home.allot(router[:2], ask, allotted)
            else:
                home.grant(router[:2], ask, granted)
            return True

        return ask

    async def take(self, router: str, count: int = 1, tokens: int = 1) -> list[Verdict]:
        """Calls at the same time at a router."""
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[Verdict]] = [loop.create_future() for _ in range(count)]
        for answer in answers:
            self.limits[router].take(TENANT, self.quota, tokens, answer.set_result)
        async with asyncio.timeout(PATIENCE_S):
            return list(await asyncio.gather(*answers))

    async def granted(self, router: str, count: int) -> list[Grant]:
        return [each for each in await self.take(router, count) if isinstance(each, Grant)]

    async def second(self) -> None:
        """Let a second pass, with the answers to all that is asked in it."""
        for each in self.cells.values():
            each.tick()
        for router in ROUTERS:
            await self.told(router)
        self.clock.at += 1.0

    async def told(self, router: str) -> None:
        """Wait until Redis has what a router sent: answers come in the order of the questions."""
        asked: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self.stores[router].take("another", Quota(requests_per_min=10_000), 0, asked.set_result)
        async with asyncio.timeout(PATIENCE_S):
            await asked

    async def separate(self) -> None:
        """Cut the cells off from each other, for so long that they know."""
        self.apart = True
        for _ in range(8):
            await self.second()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest_asyncio.fixture
async def tasks(redis: RedisServer) -> AsyncIterator[AsyncExitStack]:
    assert redis.ask("FLUSHALL") == "+OK"
    async with AsyncExitStack() as stack:
        yield stack


async def cells_of(quota: Quota, redis: RedisServer, tasks: AsyncExitStack) -> Cells:
    made = Cells(quota)
    await made.start(redis, tasks)
    return made


async def test_routers_of_all_cells_spend_one_bucket(redis: RedisServer, tasks: AsyncExitStack) -> None:
    per_min = 600
    cells, began = await cells_of(Quota(requests_per_min=per_min), redis, tasks), time.monotonic()
    granted = [len(await cells.granted(router, 100)) for router in ROUTERS * 3]
    assert sum(granted) <= per_min * (1 + (time.monotonic() - began) / 60) + 1
    assert sum(granted) >= 0.9 * per_min
    assert all(granted[:4])


async def test_tokens_that_were_not_used_go_back_to_that_bucket(
    redis: RedisServer, tasks: AsyncExitStack
) -> None:
    cells = await cells_of(Quota(tokens_per_min=6000), redis, tasks)
    for router in ROUTERS * 10:
        (grant,) = await cells.take(router, tokens=1500)
        assert isinstance(grant, Grant), router
        cells.limits[router].settle(grant, 1)
        await cells.told(router)


async def test_what_is_returned_of_an_allotment_is_in_the_bucket_again(
    redis: RedisServer, tasks: AsyncExitStack
) -> None:
    cells = await cells_of(Quota(tokens_per_min=1000), redis, tasks)

    async def allot(router: str, wanted: float, returned: float = 0.0) -> float:
        amount: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        cells.stores[router].allot(
            TENANT, "tokens", 1000, wanted=wanted, returned=returned, then=amount.set_result
        )
        async with asyncio.timeout(PATIENCE_S):
            return await amount

    assert await allot("eu-a", 800) == 800
    assert 200 <= await allot("eu-b", 800) < 800
    assert await allot("eu-a", 900, returned=950) == 900


async def test_routers_of_all_cells_share_the_slots_of_a_tenant(
    redis: RedisServer, tasks: AsyncExitStack
) -> None:
    cells = await cells_of(Quota(concurrency=8), redis, tasks)
    running = {router: await cells.granted(router, 3) for router in ROUTERS}
    assert sum(map(len, running.values())) == 8
    assert all(len(running[router]) == 3 for router in ROUTERS[:2])
    for router, grants in running.items():
        for grant in grants:
            cells.limits[router].settle(grant, 1)
    for _ in range(3):
        await cells.second()
    assert len(await cells.granted("us-a", 8)) == 8


@pytest.mark.parametrize("quota", [Quota(requests_per_min=60), Quota(concurrency=6)])
async def test_routers_of_a_cell_that_is_apart_use_its_part_together(
    quota: Quota, redis: RedisServer, tasks: AsyncExitStack
) -> None:
    cells = await cells_of(quota, redis, tasks)
    part = (quota.requests_per_min or quota.concurrency or 0) // len(CELLS)
    await cells.separate()
    granted = {router: await cells.granted(router, part) for router in ("us-a", "us-b")}
    assert [len(each) for each in granted.values()] in ([part, 0], [part, 1])
    for grant in granted["us-a"]:
        cells.limits["us-a"].release(grant)
    await cells.told("us-a")
    assert len(await cells.granted("us-b", part)) in (part - 1, part)


async def test_what_needs_more_than_the_part_is_refused_while_apart(
    redis: RedisServer, tasks: AsyncExitStack
) -> None:
    cells = await cells_of(Quota(tokens_per_min=1000), redis, tasks)
    await cells.separate()
    (refusal,) = await cells.take("us-a", tokens=501)
    assert isinstance(refusal, LimitRefusal)
    assert refusal.limit == "tokens"
    assert isinstance((await cells.take("us-a", tokens=500))[0], Grant)


async def test_requests_that_began_before_a_cut_end_where_they_were_counted(
    redis: RedisServer, tasks: AsyncExitStack
) -> None:
    cells = await cells_of(Quota(concurrency=4), redis, tasks)
    before = await cells.granted("us-a", 2)
    await cells.separate()
    during = await cells.granted("us-a", 2)
    assert (len(before), len(during)) == (2, 2)
    for grant in (*before, *during):
        cells.limits["us-a"].settle(grant, 1)
    cells.apart = False
    for _ in range(3):
        await cells.second()
    assert len(await cells.granted("us-b", 4)) == 4


async def test_a_home_cell_without_its_store_does_not_answer(
    redis: RedisServer, tasks: AsyncExitStack
) -> None:
    cells = await cells_of(Quota(requests_per_min=60, concurrency=4), redis, tasks)
    for router in ("eu-a", "eu-b"):
        cells.stores[router].shared = False
    await cells.separate()
    cells.apart = False
    await cells.second()
    assert len(await cells.granted("us-a", 5)) == 2
    assert all(isinstance(cells.limits[router], SharedRateLimits) for router in ROUTERS)
