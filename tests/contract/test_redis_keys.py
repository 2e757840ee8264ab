"""API keys in a real Redis: what `kvasir keys` changes there counts in every router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.kit.lab.redis_server import RedisServer

from kvasir.clock import MonotonicClock
from kvasir.config.load.loader import load
from kvasir.config.spec.redis import LimitsRedisSpec
from kvasir.core.errors import KvasirError
from kvasir_platform.cli.main import main
from kvasir_platform.gateway.tenants import redis_keys
from kvasir_platform.gateway.tenants.callers import Callers, make_callers
from kvasir_platform.gateway.tenants.redis_connection import RedisConnection
from kvasir_platform.gateway.tenants.redis_keys import RedisKeySource
from kvasir_platform.gateway.tenants.redis_limits import RedisLimits

PATIENCE_S = 30.0


class FastClock(MonotonicClock):
    """Pauses are short: what takes a second takes a hundredth of it."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 100)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


class Keys:
    """The command on a spec, and routers that follow."""

    def __init__(self, folder: Path, server: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
        self.server = server
        self._capsys = capsys
        self._spec = folder / "kvasir.yaml"
        self._spec.write_text(
            "gateway: {api_keys_redis: true}\n"
            f"tenancy: {{tenants: [{{name: shop}}], redis: {{url: '{server.url}'}}}}\n"
        )

    async def run(self, *arguments: str, status: int = 0) -> Any:
        done = await asyncio.to_thread(main, ["-o", "json", "keys", *arguments, "-f", str(self._spec)])
        assert done == status
        out, err = self._capsys.readouterr()
        return json.loads(out) if status == 0 else out + err

    @asynccontextmanager
    async def router(self) -> AsyncIterator[Callers]:
        deployment, clock = load(self._spec, []), FastClock()
        made = make_callers(deployment, clock, lambda: 1.8e9, _Rng(), {}, secret=b"s" * 32)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(made.run())
            yield made
            running.cancel()


class _Rng:
    def random(self) -> float:
        return 0.5

    def randrange(self, stop: int, /) -> int:
        return 0

    def getrandbits(self, k: int, /) -> int:
        return 1


def code(router: Callers, key: str) -> str:
    """The tenant of a key, or the code of its refusal."""
    try:
        return router.of({b"authorization": f"Bearer {key}".encode()}).tenant
    except KvasirError as error:
        return error.code


async def until(router: Callers, key: str, expected: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while code(router, key) != expected:
            await asyncio.sleep(0.005)


async def test_keys_are_created_rotated_and_revoked_in_all_routers(
    tmp_path: Path, redis: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = Keys(tmp_path, redis, capsys)
    async with keys.router() as one, keys.router() as other:
        made = await keys.run("create", "--tenant", "shop", "--scopes", "inference")
        for router in (one, other):
            await until(router, made["key"], "shop")
            assert code(router, "unknown") == "invalid_api_key"
        assert made["key"] not in str(redis.ask("HVALS", "kvasir:api-keys"))
        successor = await keys.run("rotate", made["id"], "--overlap", "1h")
        await until(other, successor["key"], "shop")
        assert {key["id"] for key in await keys.run("list")} == {made["id"], successor["id"]}
        await keys.run("revoke", successor["id"])
        for router in (one, other):
            await until(router, successor["key"], "invalid_api_key")
        assert "there is no key" in await keys.run("revoke", successor["id"], status=2)


async def test_keys_that_were_read_stay_in_use_without_redis_and_when_it_has_lost_them(
    tmp_path: Path,
    redis: RedisServer,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = Keys(tmp_path, redis, capsys)
    made = await keys.run("create", "--tenant", "shop")
    monkeypatch.setattr(redis_keys, "_ANSWER_S", 0.3)

    async def logged(times: int) -> list[str]:
        """The reasons that were logged, once there are as many."""
        async with asyncio.timeout(PATIENCE_S):
            while len(found := [each.reason for each in caplog.records if hasattr(each, "reason")]) < times:
                await asyncio.sleep(0.005)
        return found

    async with keys.router() as one:
        await until(one, made["key"], "shop")
        redis.freeze()
        assert "nothing was changed" in await keys.run("create", status=2)
        async with keys.router() as other:
            await logged(2)
            assert code(other, made["key"]) == "api_keys_unavailable"
            assert (code(one, made["key"]), code(one, "unknown")) == ("shop", "invalid_api_key")
            redis.thaw()
            await until(other, made["key"], "shop")
        redis.ask("FLUSHALL")
        assert "lost its data" in (await logged(3))[-1]
        assert code(one, made["key"]) == "shop"


async def test_a_server_that_comes_back_without_the_keys_is_told_as_well(
    tmp_path: Path, redis: RedisServer, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(tmp_path, redis, capsys)
    made = await keys.run("create", "--tenant", "shop")

    async def told(words: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not any(words in f"{each.msg}: {getattr(each, 'reason', '')}" for each in caplog.records):
                await asyncio.sleep(0.005)

    async with keys.router() as router:
        await until(router, made["key"], "shop")
        redis.close()
        await told("cannot be read")
        redis.start()
        await told("lost its data")
        assert code(router, made["key"]) == "shop"


async def test_keys_that_redis_loses_while_they_are_read_stay_in_use(
    tmp_path: Path,
    redis: RedisServer,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, read = Keys(tmp_path, redis, capsys), redis_keys._lines
    made = await keys.run("create", "--tenant", "shop")

    async def read_once_lost(connection: RedisConnection, name: str) -> Sequence[str]:
        redis.ask("FLUSHALL")
        return await read(connection, name)

    async with keys.router() as router:
        await until(router, made["key"], "shop")
        monkeypatch.setattr(redis_keys, "_lines", read_once_lost)
        await keys.run("create", "--tenant", "shop")
        async with asyncio.timeout(PATIENCE_S):
            while "lost its data" not in str([getattr(each, "reason", "") for each in caplog.records]):
                await asyncio.sleep(0.005)
        assert code(router, made["key"]) == "shop"


@pytest.mark.parametrize("kind", ["keys", "limits"])
async def test_whatever_follows_redis_ends_when_it_is_cancelled(kind: str, redis: RedisServer) -> None:
    spec = LimitsRedisSpec(url=redis.url)
    for number in range(60):
        clock = FastClock()
        follows = RedisKeySource(spec, clock) if kind == "keys" else RedisLimits(spec, clock, "router")
        running = asyncio.create_task(follows.run())
        # At another step of the connection each time.
        await asyncio.sleep(number * 0.0002)
        running.cancel()
        _, waiting = await asyncio.wait([running], timeout=PATIENCE_S)
        assert not waiting
