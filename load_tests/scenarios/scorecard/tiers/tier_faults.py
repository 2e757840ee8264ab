"""KV tiers of a worker and their faults, each with a proof that it happened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from tests.kit.lab import small_disk
from tests.kit.lab.proxy import DOWNSTREAM, Link, TcpProxy
from tests.kit.lab.redis_server import RedisServer
from tests.kit.lab.small_disk import SmallDisk
from tests.kit.programs import missing

from kvasir.config.spec.tiers import CpuTierSpec, DiskTierSpec, RedisTierSpec, TiersSpec
from load_tests.scenarios.scorecard.common import NotProven, Trial

SLOW_S = 0.1
"""Delay of a slow tier's answers, unless its deadline is longer than half of it."""
MEMORY = CpuTierSpec(bytes=16 << 20)
"""Small enough that blocks stored before a fault are in the tier alone."""
DISK_BYTES = 512 << 20
SLOW_LINK = Link(bytes_per_s=4e6)
"""A link over which look-ups are in time, and blocks take longer than it does to compute them."""
Act = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """`begin` and `end` raise if the fault did not happen. `read`: the tier is still read during the fault.
    `lost`: its contents are lost afterwards. `remedy` is the advice in the worker's log."""

    name: str
    begin: Act
    end: Act
    remedy: str
    read: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier under test. `label` is its label in metrics, `called` its name in the log. `shape` sets the
    link over which it answers, if there is one."""

    name: str
    label: str
    called: str
    spec: TiersSpec
    faults: Sequence[Fault]
    shape: Callable[[Link], None] | None = None


@asynccontextmanager
async def redis(trial: Trial, lookup_timeout_s: float) -> AsyncIterator[Tier]:
    """A Redis server, with faults of the server or of the connection."""
    with RedisServer(trial.folder) as server:
        async with TcpProxy(server.address, clock=trial.clock, rng=trial.rng()) as proxy:
            delayed = 0

            async def kill() -> None:
                if await asyncio.to_thread(server.ask, "DBSIZE") == ":0":
                    raise NotProven("there are no blocks to lose")
                await asyncio.to_thread(server.kill)
                proxy.reset()

            async def slow() -> None:
                nonlocal delayed
                delayed = proxy.counts.delayed
                proxy.shape(DOWNSTREAM, Link(delay_s=max(SLOW_S, 2 * lookup_timeout_s)))

            async def quick() -> None:
                proxy.shape(DOWNSTREAM, Link())
                if proxy.counts.delayed == delayed:
                    raise NotProven("nothing was delayed")

            async def fill() -> None:
                await asyncio.to_thread(server.ask, "CONFIG", "SET", "maxmemory", "1mb")
                answer = await asyncio.to_thread(server.ask, "SET", "one", "more")
                if not answer.startswith("-OOM"):
                    raise NotProven(f"a full server takes writes: {answer}")

            async def grow() -> None:
                await asyncio.to_thread(server.ask, "CONFIG", "SET", "maxmemory", "0")

            faults = (
                Fault("killed", kill, _blocking(server.start), "see that it runs", lost=True),
                Fault("stopped", _blocking(server.freeze), _blocking(server.thaw), "look at its load"),
                Fault("slow", slow, quick, "look at its load"),
                Fault("full", fill, grow, "raise its maxmemory", read=True),
            )
            spec = RedisTierSpec(url=f"redis://{proxy.address}/0", lookup_timeout_s=lookup_timeout_s)
            tiers = TiersSpec(cpu=MEMORY, redis=spec)
            yield Tier(
                "Redis", "remote", "the Redis tier at", tiers, faults, partial(proxy.shape, DOWNSTREAM)
            )


@asynccontextmanager
async def disk(trial: Trial, lookup_timeout_s: float) -> AsyncIterator[Tier]:
    """A filesystem smaller than the tier's bound. Look-ups are answered from memory, so their deadline does
    not matter."""
    path = trial.folder / "disk"
    path.mkdir()
    with SmallDisk(path, DISK_BYTES) as small:
        faults = (
            Fault("full", _blocking(small.fill), _blocking(small.grow), "free space there", read=True),
            Fault("read-only", _blocking(small.forbid_writes), _blocking(small.allow_writes),
                  "mount it writable", read=True),
        )  # fmt: skip
        spec = DiskTierSpec(path=str(path), bytes=2 * DISK_BYTES, lookup_timeout_s=lookup_timeout_s)
        tiers = TiersSpec(cpu=MEMORY, disk=spec)
        yield Tier("disk", "disk", "the disk tier at", tiers, faults)


def _blocking(call: Callable[[], None]) -> Act:
    async def act() -> None:
        await asyncio.to_thread(call)

    return act


def _missing_redis() -> str | None:
    return missing("redis-server")


TIERS = {"Redis": (_missing_redis, redis), "disk": (small_disk.available, disk)}
"""Return what is missing on this machine and how to install it."""
