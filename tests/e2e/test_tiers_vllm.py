"""Tiers below real vLLM engines: stored KV is loaded again, on another worker too, with equal tokens.

Engines on the embedded model, float32 and one thread each, so that equal KV gives equal tokens. The device's
cache holds 64 blocks, so that a few prompts are enough to evict one.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from tests.kit.engines.bench import EngineBench, FreshPrompts
from tests.kit.engines.lost_worker import GREEDY, lost_worker
from tests.kit.engines.recorder import Recorded
from tests.kit.lab.redis_server import RedisServer
from tests.kit.shared.engines import EngineRegistry, WantedEngine

from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec, PoolSpec
from kvasir.config.spec.tiers import CpuTierSpec, DiskTierSpec, RedisTierSpec, TiersSpec
from kvasir.core.kv import Medium, TierLoad
from kvasir.core.requests import EngineRequest, KvHandoff, Leg, Role, Timings, Usage

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

MODEL = resolve_model("kvasir-tiny")
HELPERS = Path(__file__).parents[1] / "kit" / "engines"
BLOCK = 32
KV_BYTES = 8 << 20
MEMORY = CpuTierSpec(bytes=64 << 20)
PATIENCE_S = 30.0


def deployment(tiers: TiersSpec, *, tensor_parallel_size: int = 1, decode: bool = False) -> Deployment:
    engine = EngineSpec(
        kind="vllm",
        block_size=BLOCK,
        kv_cache_bytes=KV_BYTES,
        max_num_batched_tokens=512,
        threads=1,
        tensor_parallel_size=tensor_parallel_size,
    )
    pools = [PoolSpec(name="main", role=Role.DECODE if decode else Role.BOTH, engine=engine)]
    if decode:
        pools.append(PoolSpec(name="prefill", role=Role.PREFILL, engine=engine))
    return Deployment(
        model=ModelSpec(source=str(MODEL), dtype="float32", max_model_len=1600),
        disaggregation="always" if decode else "never",
        pools=tuple(pools),
        tiers=tiers,
    )


@dataclass
class Worker:
    """An engine, and prompts that no engine has seen."""

    bench: EngineBench
    rng: random.Random

    def prompt(self, length: int) -> list[int]:
        return FreshPrompts(self.rng).fresh(length)

    async def serve(self, prompt: list[int], **changes: Any) -> Recorded:
        return await self.bench.generate(prompt, GREEDY, **changes)

    async def alone(self, prompt: list[int]) -> list[int]:
        """What the engine says without any KV from elsewhere: the salt hides all of it."""
        salt = f"alone-{self.rng.random()}"
        return (await self.serve(prompt, salt=salt)).choice().tokens

    async def evict(self) -> None:
        """Fill the device's cache with other prompts."""
        for _ in range(3):
            await self.serve(self.prompt(1200))

    def tier(self, medium: Medium) -> TierLoad:
        (found,) = [load for load in self.bench.engine.load().tiers if load.medium is medium]
        return found

    async def written(self, blocks: int) -> None:
        """Return once the disk has been given that many blocks."""
        await self.until(lambda: self.tier(Medium.DISK).stored_blocks >= blocks)

    async def until(self, true: Callable[[], bool]) -> None:
        """Return once it is true, asking the engine for small things meanwhile: idle engines tell nothing."""
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                await self.serve([7])


def spec_of(tiers: TiersSpec, name: str = "main-0", **options: Any) -> WantedEngine:
    return WantedEngine(deployment(tiers, **options), "main", name)


Running = Callable[..., AbstractAsyncContextManager[Worker]]


@pytest.fixture
def running(engines: EngineRegistry) -> Running:
    """Starts an engine for one test."""

    @asynccontextmanager
    async def started(tiers: TiersSpec, seed: int = 11, **options: Any) -> AsyncIterator[Worker]:
        async with engines.alone(spec_of(tiers, **options)) as (bench,):
            yield Worker(bench, random.Random(seed))

    return started


def usage(done: Recorded) -> Usage:
    assert done.last is not None
    assert done.last.usage is not None, done.last
    return done.last.usage


def timings(done: Recorded) -> Timings:
    assert done.last is not None
    assert done.last.timings is not None
    return done.last.timings


@dataclass
class Lost:
    """What a worker said before it was killed: to a prompt that only the shared Redis holds, and to one that
    its disk holds too. `left` are its processes that have not exited by themselves since."""

    shared_tier: str
    in_redis: tuple[list[int], list[int]]
    on_disk: tuple[list[int], list[int]]
    left: set[int]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "kv"


@pytest.fixture(scope="module")
def tiers(redis: RedisServer, disk: Path) -> TiersSpec:
    """All of them."""
    # What is tried is what outlives a worker, and not whether a loaded machine keeps the deadline.
    files = DiskTierSpec(path=str(disk), lookup_timeout_s=1.0)
    return TiersSpec(cpu=MEMORY, disk=files, redis=RedisTierSpec(url=redis.url, lookup_timeout_s=0.05))


@pytest.fixture(scope="module")
def lost(tiers: TiersSpec, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Lost:
    """A worker on the node, which is killed."""
    pytest.importorskip("vllm")
    prompts = FreshPrompts(random.Random(1))
    with lost_worker(deployment(tiers, decode=True), tmp_path_factory.mktemp("lost")) as worker:
        shared, kept = prompts.fresh(1400), prompts.fresh(1400)
        in_redis = shared, worker.ask(shared)
        gone = [file for file in disk.rglob("*") if file.name.startswith(file.parent.name)]
        on_disk = kept, worker.ask(kept)
        left = set(worker.cores) - worker.kill()
    assert worker.cores, "the engine did not start"
    for file in gone:
        file.unlink()
    return Lost(worker.shared_tier, in_redis, on_disk, left)


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, the engine below gives all blocks one name."""
    return tmp_path_factory.mktemp("one-name") / "switch"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def worker(
    lost: Lost, tiers: TiersSpec, switch: Path, engines: EngineRegistry
) -> AsyncIterator[Worker]:
    """The successor of the lost worker, which also pulls KV from others: host memory, a disk and a Redis
    below it."""
    from kvasir_workers.connector.tiers import scheduler as tier_scheduler
    from kvasir_workers.engines.vllm.setup import arguments

    with pytest.MonkeyPatch.context() as patch:
        # The connector is loaded in this process too, and what it does there must end with the module.
        names = vars(tier_scheduler)
        patch.setitem(names, "chain_hashes", names["chain_hashes"])
        patch.setattr(arguments, "CONNECTOR_MODULE", "one_name_connector")
        patch.syspath_prepend(HELPERS)
        path = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), path]).rstrip(os.pathsep))
        patch.setenv("KVASIR_TESTS_ONE_NAME", str(switch))
        wanted = WantedEngine(deployment(tiers, decode=True), "main", "main-0", variant="one name")
        (bench,) = await engines.running(wanted)
        yield Worker(bench, random.Random(11))


async def test_a_killed_front_leaves_no_core_behind(lost: Lost) -> None:
    assert lost.left == set()


@pytest.mark.parametrize("length", [33, 64, 700, 1400])
async def test_an_evicted_prefix_comes_back_from_host_memory(worker: Worker, length: int) -> None:
    prompt = worker.prompt(length)
    alone = await worker.alone(prompt)
    first = await worker.serve(prompt)
    await worker.evict()
    again = await worker.serve(prompt)
    assert first.choice().tokens == again.choice().tokens == alone
    assert usage(first).tier_tokens == 0
    assert usage(again).tier_tokens == usage(again).cached_tokens == (length - 1) // BLOCK * BLOCK
    assert timings(again).tier_s > 0


async def test_a_longer_prompt_with_the_same_beginning_loads_the_beginning(worker: Worker) -> None:
    prompt = worker.prompt(640)
    await worker.serve(prompt)
    await worker.evict()
    longer = prompt + worker.prompt(300)
    done = await worker.serve(longer)
    assert usage(done).tier_tokens == 640
    assert done.choice().tokens == await worker.alone(longer)


async def test_what_was_generated_comes_back_too(worker: Worker) -> None:
    prompt = worker.prompt(100)
    done = await worker.bench.generate(prompt, replace(GREEDY, max_tokens=80))
    await worker.evict()
    turn = [*prompt, *done.choice().tokens, *worker.prompt(5)]
    again = await worker.serve(turn)
    assert usage(again).tier_tokens == (len(prompt) + 79) // BLOCK * BLOCK
    assert again.choice().tokens == await worker.alone(turn)


async def test_another_salt_finds_nothing(worker: Worker) -> None:
    prompt = worker.prompt(320)
    await worker.serve(prompt, salt="one")
    await worker.evict()
    assert usage(await worker.serve(prompt, salt="other")).cached_tokens == 0
    await worker.evict()
    assert usage(await worker.serve(prompt, salt="one")).tier_tokens == 288


async def test_many_at_once_get_their_own_kv(worker: Worker) -> None:
    prompts = [worker.prompt(length) for length in (40, 300, 129, 257, 64, 33)]
    alone = [await worker.alone(prompt) for prompt in prompts]
    for prompt in prompts:
        await worker.serve(prompt)
    await worker.evict()
    done = await asyncio.gather(*(worker.serve(prompt) for prompt in prompts))
    assert [each.choice().tokens for each in done] == alone
    assert [usage(each).tier_tokens for each in done] == [(len(p) - 1) // BLOCK * BLOCK for p in prompts]


async def test_a_hinted_prompt_is_fetched_while_it_waits(worker: Worker) -> None:
    prompt = worker.prompt(700)
    await worker.serve(prompt)
    await worker.evict()
    request: EngineRequest = replace(worker.bench.request(prompt, GREEDY), tier_tokens=672)
    (done,) = await worker.bench.run(request)
    assert usage(done).tier_tokens == 672


async def test_routers_are_told_what_host_memory_holds(worker: Worker) -> None:
    kv = worker.bench.engine.kv
    assert kv is not None
    held: Callable[[int, Medium], int] = kv.held  # type: ignore[attr-defined]
    await worker.until(lambda: held(0, Medium.CPU) == worker.tier(Medium.CPU).blocks > 0)


async def test_requests_aborted_around_their_load_leak_nothing(worker: Worker) -> None:
    prompt = worker.prompt(1400)
    alone = await worker.alone(prompt)
    await worker.serve(prompt)
    for _ in range(6):
        await worker.evict()
        request = worker.bench.request(prompt, GREEDY)
        worker.bench.engine.submit([request])
        await asyncio.sleep(worker.rng.random() * 0.01)
        worker.bench.engine.abort([request.request_id])
        await worker.bench.ended(request.request_id)
    assert (await worker.serve(prompt)).choice().tokens == alone
    assert worker.bench.engine.load().kv_usage == 0


async def test_no_engine_spins_when_nothing_runs(worker: Worker) -> None:
    await worker.serve(worker.prompt(100))
    family = psutil.Process().children(recursive=True)
    before = {process.pid: sum(process.cpu_times()[:2]) for process in family}
    await asyncio.sleep(5)
    spent = [sum(process.cpu_times()[:2]) - before[process.pid] for process in family]
    assert max(spent) < 2.5, spent


async def test_after_a_failed_pull_tiers_are_asked_before_anything_is_computed(worker: Worker) -> None:
    prompt = worker.prompt(500)
    alone = (await worker.serve(prompt)).choice().tokens
    await worker.evict()
    garbled = KvHandoff("lease", 1, 10.0, 16, b"garbage")
    failed = worker.bench.engine.load().transfers_failed
    done = await worker.serve(prompt, leg=Leg.DECODE, handoff=garbled)
    assert done.choice().tokens == alone
    assert usage(done).tier_tokens == usage(done).cached_tokens == 480
    assert usage(done).transferred_tokens == 0
    assert worker.bench.engine.load().transfers_failed == failed + 1


async def test_a_killed_worker_s_successor_loads_from_its_disk(worker: Worker, lost: Lost) -> None:
    await worker.until(lambda: worker.tier(Medium.DISK).blocks >= 43)
    prompt, first = lost.on_disk
    before = worker.tier(Medium.DISK).loaded_blocks
    again = await worker.serve(prompt)
    assert again.choice().tokens == first == await worker.alone(prompt)
    assert usage(again).tier_tokens == 1376
    assert worker.tier(Medium.DISK).loaded_blocks == before + 43
    kv = worker.bench.engine.kv
    assert kv is not None
    held: Callable[[int, Medium], int] = kv.held  # type: ignore[attr-defined]
    await worker.until(lambda: held(0, Medium.DISK) == worker.tier(Medium.DISK).blocks)


async def test_what_one_worker_computed_another_loads_from_redis_and_serves_on_without_it(
    worker: Worker, lost: Lost, redis: RedisServer
) -> None:
    assert worker.bench.identity.shared_tier == lost.shared_tier != ""
    prompt, first = lost.in_redis
    before = worker.tier(Medium.REMOTE).loaded_blocks
    again = await worker.serve(prompt)
    assert again.choice().tokens == first == await worker.alone(prompt)
    assert usage(again).tier_tokens == 1376
    assert worker.tier(Medium.REMOTE).loaded_blocks == before + 43
    assert usage(await worker.serve(prompt, salt="other tenant")).cached_tokens == 0

    redis.freeze()
    for _ in range(4):
        before = worker.tier(Medium.DISK).stored_blocks
        assert timings(await worker.serve(worker.prompt(300))).tier_s < 0.1
        # Nothing waits for the disk.
        await worker.written(before + 9)
    redis.thaw()
    redis.kill()
    assert (await worker.serve(prompt)).choice().tokens == first
    await worker.serve(worker.prompt(300))
    await worker.until(lambda: worker.tier(Medium.REMOTE).trouble != "")


async def test_an_idle_engine_says_by_itself_that_its_tier_is_well_again(
    worker: Worker, redis: RedisServer
) -> None:
    redis.close()
    await worker.serve(worker.prompt(300))
    await worker.until(lambda: worker.tier(Medium.REMOTE).trouble != "")
    redis.start()
    async with asyncio.timeout(PATIENCE_S * 3):
        while worker.tier(Medium.REMOTE).trouble:
            await asyncio.sleep(0.05)


async def test_prompts_forced_onto_one_name_share_no_kv(worker: Worker, switch: Path) -> None:
    switch.touch()
    prompts = [worker.prompt(700) for _ in range(3)]
    alone = [await worker.alone(prompt) for prompt in prompts]
    before = worker.tier(Medium.CPU).loaded_blocks
    for _ in range(2):
        for prompt, tokens in zip(prompts, alone, strict=True):
            assert (await worker.serve(prompt)).choice().tokens == tokens
            await worker.evict()
    assert worker.tier(Medium.CPU).loaded_blocks > before


@pytest.mark.soak
async def test_both_ranks_of_two_keep_and_load_their_part(running: Running) -> None:
    async with running(TiersSpec(cpu=MEMORY), tensor_parallel_size=2) as worker:
        prompt = worker.prompt(700)
        alone = await worker.alone(prompt)
        await worker.serve(prompt)
        await worker.evict()
        await worker.evict()
        again = await worker.serve(prompt)
        assert again.choice().tokens == alone
        assert usage(again).tier_tokens == 672
