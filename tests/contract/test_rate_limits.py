"""Contract of rate limits: in memory, over an edge's link, and in a real Redis."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from tests.kit.gateway.edge_link import core_parts, linked
from tests.kit.gateway.scripted_router import ScriptedRouter
from tests.kit.lab.redis_server import RedisServer

from kvasir.clock import MonotonicClock
from kvasir.config.spec.redis import LimitsRedisSpec
from kvasir.ports.limits import BucketLevels, Grant, LimitRefusal, Quota, RateLimits
from kvasir_platform.gateway.tenants.memory_limits import MemoryLimits
from kvasir_platform.gateway.tenants.redis_limits import RedisLimits

PATIENCE_S = 30.0
NEAR = 5.0
"""Seconds that may pass between two questions on a loaded machine."""


@dataclass
class Bench:
    """Routers with rate limits of one kind. Those over Redis count together, those in memory are one."""

    make: Callable[[], RateLimits]
    tasks: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def router(self) -> RateLimits:
        limits = self.make()
        running = asyncio.create_task(limits.run())
        self.tasks.push_async_callback(end, running)
        if isinstance(limits, RedisLimits):
            await until(lambda: limits.shared)
        return limits


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.001)


async def take(limits: RateLimits, tenant: str, quota: Quota, tokens: int = 0) -> Grant | LimitRefusal:
    answer: asyncio.Future[Grant | LimitRefusal] = asyncio.get_running_loop().create_future()
    limits.take(tenant, quota, tokens, answer.set_result)
    async with asyncio.timeout(PATIENCE_S):
        return await answer


async def granted(limits: RateLimits, tenant: str, quota: Quota, tokens: int = 0) -> Grant:
    verdict = await take(limits, tenant, quota, tokens)
    assert isinstance(verdict, Grant), verdict
    return verdict


async def refused(limits: RateLimits, tenant: str, quota: Quota, tokens: int = 0) -> LimitRefusal:
    verdict = await take(limits, tenant, quota, tokens)
    assert isinstance(verdict, LimitRefusal), verdict
    return verdict


def near(levels: BucketLevels, requests_s: float, tokens_s: float) -> bool:
    return (
        requests_s - NEAR <= levels.requests_s <= requests_s + 1e-3
        and tokens_s - NEAR <= levels.tokens_s <= tokens_s + 1e-3
    )


def spec(server: RedisServer, **changes: object) -> LimitsRedisSpec:
    # A loaded machine takes its time; the deadline has tests of its own.
    return LimitsRedisSpec.model_validate({"url": server.url, "timeout_s": 5.0, **changes})


class CountingClock(MonotonicClock):
    """Real time, and how often somebody slept."""

    def __init__(self) -> None:
        self.sleeps = 0

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        self.sleeps += 1


def over(server: RedisServer, clock: MonotonicClock | None = None, **changes: object) -> RedisLimits:
    return RedisLimits(spec(server, **changes), clock or MonotonicClock(), f"{random.getrandbits(64):x}")


@pytest_asyncio.fixture(params=["memory", "edge", "redis"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    if request.param == "memory":
        made = Bench(lambda: MemoryLimits(MonotonicClock().now))
    elif request.param == "edge":
        clock = MonotonicClock()
        stack = AsyncExitStack()
        both = await stack.enter_async_context(
            linked(core_parts(ScriptedRouter(clock), MemoryLimits(clock.now)))
        )
        made = Bench(lambda: both.link.limits, stack)
    else:
        server: RedisServer = request.getfixturevalue("redis")
        assert server.ask("FLUSHALL") == "+OK"
        made = Bench(lambda: over(server))
    async with made.tasks:
        yield made


async def test_a_minutes_worth_may_come_at_once_and_no_more(bench: Bench) -> None:
    limits = await bench.router()
    quota = Quota(requests_per_min=3)
    levels = [(await granted(limits, "a", quota)).levels for _ in range(3)]
    assert near(levels[0], 20, 0)
    assert near(levels[2], 60, 0)
    refusal = await refused(limits, "a", quota)
    assert refusal.limit == "requests"
    assert 20 - 2 * NEAR <= refusal.retry_after_s <= 20
    await granted(limits, "b", quota)


async def test_who_waits_as_told_gets_in(bench: Bench) -> None:
    limits = await bench.router()
    quota = Quota(requests_per_min=600, tokens_per_min=60_000)
    await granted(limits, "a", quota, 60_000)
    waited = 0
    while waited < 5:
        verdict = await take(limits, "a", quota, 200)
        if isinstance(verdict, LimitRefusal):
            assert verdict.limit == "tokens"
            assert verdict.retry_after_s <= 0.2 + 1e-3
            await asyncio.sleep(verdict.retry_after_s)
            await granted(limits, "a", quota, 200)
            waited += 1


async def test_a_refusal_names_what_is_in_the_way_for_longest_and_charges_nothing(bench: Bench) -> None:
    limits = await bench.router()
    quota = Quota(requests_per_min=6, tokens_per_min=60, concurrency=2)
    first = await granted(limits, "a", quota, 50)
    for _ in range(3):
        refusal = await refused(limits, "a", quota, 60)
        assert refusal.limit == "tokens"
        assert 50 - NEAR <= refusal.retry_after_s <= 50
        assert near(refusal.levels, 10, 50)
    second = await granted(limits, "a", quota)
    assert (await refused(limits, "a", quota)).limit == "concurrency"
    limits.settle(first, 50)
    limits.settle(second, 0)
    assert near((await granted(limits, "a", quota)).levels, 30, 50)


async def test_settling_gives_back_what_was_not_used_and_takes_what_was_used_beyond(bench: Bench) -> None:
    limits = await bench.router()
    quota = Quota(tokens_per_min=60)
    limits.settle(await granted(limits, "a", quota, 60), 10)
    over_used = await granted(limits, "a", quota, 20)
    assert near(over_used.levels, 0, 30)
    limits.settle(over_used, 50)
    assert near((await refused(limits, "a", quota, 20)).levels, 0, 60)
    limits.settle(await granted(limits, "b", quota, 60), 1000)
    owes = await refused(limits, "b", quota, 60)
    assert near(owes.levels, 0, 120)
    assert 120 - NEAR <= owes.retry_after_s <= 120


async def test_a_release_gives_back_everything(bench: Bench) -> None:
    limits = await bench.router()
    quota = Quota(1, 60, 1)
    for _ in range(3):
        limits.release(await granted(limits, "a", quota, 60))
    limits.settle(await granted(limits, "a", quota, 60), 60)
    assert (await refused(limits, "a", quota, 0)).limit == "requests"


async def test_places_are_free_again_when_requests_end(bench: Bench) -> None:
    limits = await bench.router()
    quota = Quota(concurrency=2)
    running = [await granted(limits, "a", quota) for _ in range(2)]
    for _ in range(5):
        refusal = await refused(limits, "a", quota)
        assert (refusal.limit, refusal.retry_after_s) == ("concurrency", 1.0)
        limits.settle(running.pop(0), 0)
        running.append(await granted(limits, "a", quota))


async def test_more_than_ever_fits_is_the_callers_fault(bench: Bench) -> None:
    limits = await bench.router()
    with pytest.raises(ValueError, match="exceed the limit"):
        limits.take("a", Quota(tokens_per_min=10), 11, lambda _: None)


async def test_many_at_once_get_exactly_what_there_is(bench: Bench) -> None:
    limits = await bench.router()
    verdicts = await asyncio.gather(*(take(limits, "a", Quota(5, 1000, 200), 10) for _ in range(300)))
    assert sum(isinstance(verdict, Grant) for verdict in verdicts) == 5
    for name in "bcd":
        await granted(limits, name, Quota(1))


async def test_routers_count_together(redis: RedisServer) -> None:
    bench = Bench(lambda: over(redis))
    assert redis.ask("FLUSHALL") == "+OK"
    async with bench.tasks:
        routers = [await bench.router() for _ in range(3)]
        grants: list[tuple[RateLimits, Grant]] = []
        for _ in range(20):
            verdicts = await asyncio.gather(*(take(each, "a", Quota(50, None, 40)) for each in routers))
            pairs = zip(routers, verdicts, strict=True)
            grants += [(owner, verdict) for owner, verdict in pairs if isinstance(verdict, Grant)]
        assert len(grants) == 40
        assert {owner for owner, _ in grants} == set(routers)
        for owner, grant in grants[:3]:
            owner.settle(grant, 0)
        for each in routers:
            await granted(each, "a", Quota(50, None, 40))
        assert (await refused(routers[0], "a", Quota(50, None, 40))).limit == "concurrency"


async def test_a_router_that_is_gone_gives_up_its_places(redis: RedisServer) -> None:
    assert redis.ask("FLUSHALL") == "+OK"
    quota = Quota(concurrency=2)
    gone, here = Bench(lambda: over(redis)), Bench(lambda: over(redis))
    async with here.tasks:
        async with gone.tasks:
            crashed = await gone.router()
            for _ in range(2):
                await granted(crashed, "a", quota)
        limits = await here.router()
        assert (await refused(limits, "a", quota)).limit == "concurrency"
        for name in keys_of(redis, "kvasir:limits:a"):
            if name.startswith("n:"):
                age(redis, "kvasir:limits:a", name, 15.5)
        await granted(limits, "a", quota)
        await granted(limits, "a", quota)
        assert (await refused(limits, "a", quota)).limit == "concurrency"


def keys_of(server: RedisServer, key: str) -> list[str]:
    script = "return table.concat(redis.call('HKEYS', KEYS[1]), ' ')"
    return server.ask("EVAL", script, "1", key).split()


def age(server: RedisServer, key: str, name: str, seconds: float) -> None:
    """Make a router's last word older."""
    script = (
        "local count, seen = string.match(redis.call('HGET', KEYS[1], ARGV[1]), '^(%d+):(.+)$') "
        "return redis.call('HSET', KEYS[1], ARGV[1], count .. ':' .. (seen - ARGV[2]))"
    )
    assert server.ask("EVAL", script, "1", key, name, str(seconds)) == ":0"


async def test_idle_tenants_leave_nothing_behind(redis: RedisServer) -> None:
    assert redis.ask("FLUSHALL") == "+OK"
    bench = Bench(lambda: over(redis, namespace="other"))
    async with bench.tasks:
        limits = await bench.router()
        limits.settle(await granted(limits, "a", Quota(10, 10, 10), 5), 5)
        await granted(limits, "b", Quota(10))
        assert 120 < int(redis.ask("TTL", "other:limits:a")[1:]) <= 180


async def test_a_clock_that_is_set_back_refuses_nobody_for_longer_than_a_minute(redis: RedisServer) -> None:
    assert redis.ask("FLUSHALL") == "+OK"
    bench = Bench(lambda: over(redis))
    async with bench.tasks:
        limits = await bench.router()
        await granted(limits, "a", Quota(2))
        assert redis.ask("HSET", "kvasir:limits:a", "r", "9999999999.0") == ":0"
        refusal = await refused(limits, "a", Quota(2))
        assert refusal.retry_after_s <= 90.0


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


def known_blocks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
async def test_a_killed_redis_refuses_nobody_is_said_once_and_is_used_again_when_it_is_back(
    faulty: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    quota = Quota(6, None, 4)
    clock = CountingClock()
    bench = Bench(lambda: over(faulty, clock))
    async with bench.tasks:
        limits = await bench.router()
        assert isinstance(limits, RedisLimits)
        before = [await granted(limits, "a", quota) for _ in range(2)]
        assert all(grant.shared for grant in before)
        faulty.kill()
        alone = [await granted(limits, "a", quota) for _ in range(2)]
        assert not any(grant.shared for grant in alone)
        # What the server had granted counts still.
        assert (await refused(limits, "a", quota)).limit == "concurrency"
        await until(lambda: not limits.shared)
        assert limits.local_decisions == 3
        limits.settle(before[0], 0)
        await until(lambda: clock.sleeps >= 3)
        assert len(known_blocks(caplog)) == 1
        faulty.start()
        await until(lambda: limits.shared)
        assert len(known_blocks(caplog)) == 2
        # It has forgotten everything; what runs here has been told to it anew.
        assert (await granted(limits, "a", quota)).shared
        assert (await refused(limits, "a", quota)).limit == "concurrency"
        for grant in (*before[1:], *alone):
            limits.release(grant)
        for _ in range(3):
            assert (await granted(limits, "a", quota)).shared
        assert limits.local_decisions == 3


async def test_a_frozen_redis_costs_one_deadline_and_then_nothing(
    faulty: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(lambda: over(faulty, timeout_s=0.1))
    async with bench.tasks:
        limits = await bench.router()
        assert isinstance(limits, RedisLimits)
        faulty.freeze()
        try:
            verdicts = await asyncio.gather(*(take(limits, "a", Quota(5)) for _ in range(10)))
            assert sum(isinstance(verdict, Grant) for verdict in verdicts) == 5
            assert not limits.shared
            at_once: list[Grant | LimitRefusal] = []
            limits.take("b", Quota(1), 0, at_once.append)
            assert len(at_once) == 1
            assert len(known_blocks(caplog)) == 1
        finally:
            faulty.thaw()
        await until(lambda: limits.shared)
        assert (await granted(limits, "c", Quota(1))).shared


@pytest.mark.parametrize(
    "trouble", [("CONFIG", "SET", "maxmemory", "1"), ("SCRIPT", "FLUSH")], ids=["full", "scripts forgotten"]
)
async def test_a_redis_that_refuses_to_answer_refuses_no_request(
    faulty: RedisServer, trouble: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(lambda: over(faulty))
    async with bench.tasks:
        limits = await bench.router()
        assert faulty.ask(*trouble) == "+OK"
        verdict = await granted(limits, "a", Quota(5, 100), 10)
        assert not verdict.shared
        limits.settle(verdict, 1)
        assert len(known_blocks(caplog)) == 1


async def test_a_wrong_password_is_said_without_showing_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "password").write_text("wrong-secret\n")
    with RedisServer(tmp_path, "--requirepass", "right-secret", password="right-secret") as server:
        limits = over(server, password_file=str(tmp_path / "password"))
        running = asyncio.create_task(limits.run())
        await until(lambda: bool(known_blocks(caplog)))
        assert not (await granted(limits, "a", Quota(5))).shared
        (tmp_path / "password").write_text("right-secret\n")
        await until(lambda: limits.shared)
        assert (await granted(limits, "a", Quota(5))).shared
        await end(running)
    assert "secret" not in caplog.text


async def test_who_waits_when_the_router_stops_is_answered(redis: RedisServer) -> None:
    bench = Bench(lambda: over(redis))
    async with bench.tasks:
        limits = await bench.router()
        answers: list[Grant | LimitRefusal] = []
        limits.take("a", Quota(1), 0, answers.append)
        assert not answers
    assert len(answers) == 1
