"""Tiers below real vLLM engines: stored KV is loaded again, on another worker too, with equal tokens.

Engines on the embedded model, float32 and one thread each, so that equal KV gives equal tokens. The device's
cache holds 64 blocks, so that a few prompts are enough to evict one.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from tests.kit.engines.bench import EngineBench, FreshPrompts
from tests.kit.engines.recorder import Recorded
from tests.kit.lab.redis_server import RedisServer
from tests.kit.processes import command_line
from tests.kit.shared.engines import EngineRegistry, WantedEngine

from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec, PoolSpec
from kvasir.config.spec.tiers import CpuTierSpec, DiskTierSpec, RedisTierSpec, TiersSpec
from kvasir.core.kv import Medium, TierLoad
from kvasir.core.requests import EngineRequest, KvHandoff, Leg, Role, Sampling, Timings, Usage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="session")]

MODEL = resolve_model("kvasir-tiny")
HELPERS = Path(__file__).parents[1] / "kit" / "engines"
BLOCK = 32
KV_BYTES = 8 << 20
MEMORY = CpuTierSpec(bytes=64 << 20)
GREEDY = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
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


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cpu(engines: EngineRegistry) -> Worker:
    """Host memory below an engine that also pulls KV from others."""
    (bench,) = await engines.running(spec_of(TiersSpec(cpu=MEMORY), decode=True))
    return Worker(bench, random.Random(11))


@dataclass
class SharedTier:
    """Two engines over one Redis."""

    redis: RedisServer
    writer: Worker
    reader: Worker


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(
    tmp_path_factory: pytest.TempPathFactory, engines: EngineRegistry
) -> AsyncIterator[SharedTier]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as redis:
        tiers = TiersSpec(cpu=MEMORY, redis=RedisTierSpec(url=redis.url, lookup_timeout_s=0.05))
        writer, reader = await engines.running(spec_of(tiers, "main-0"), spec_of(tiers, "main-1"))
        yield SharedTier(redis, Worker(writer, random.Random(1)), Worker(reader, random.Random(2)))


@pytest.mark.parametrize("length", [33, 64, 700, 1400])
async def test_an_evicted_prefix_comes_back_from_host_memory(cpu: Worker, length: int) -> None:
    prompt = cpu.prompt(length)
    alone = await cpu.alone(prompt)
    first = await cpu.serve(prompt)
    await cpu.evict()
    again = await cpu.serve(prompt)
    assert first.choice().tokens == again.choice().tokens == alone
    assert usage(first).tier_tokens == 0
    assert usage(again).tier_tokens == usage(again).cached_tokens == (length - 1) // BLOCK * BLOCK
    assert timings(again).tier_s > 0


async def test_a_longer_prompt_with_the_same_beginning_loads_the_beginning(cpu: Worker) -> None:
    prompt = cpu.prompt(640)
    await cpu.serve(prompt)
    await cpu.evict()
    longer = prompt + cpu.prompt(300)
    done = await cpu.serve(longer)
    assert usage(done).tier_tokens == 640
    assert done.choice().tokens == await cpu.alone(longer)


async def test_what_was_generated_comes_back_too(cpu: Worker) -> None:
    prompt = cpu.prompt(100)
    done = await cpu.bench.generate(prompt, replace(GREEDY, max_tokens=80))
    await cpu.evict()
    turn = [*prompt, *done.choice().tokens, *cpu.prompt(5)]
    again = await cpu.serve(turn)
    assert usage(again).tier_tokens == (len(prompt) + 79) // BLOCK * BLOCK
    assert again.choice().tokens == await cpu.alone(turn)


async def test_another_salt_finds_nothing(cpu: Worker) -> None:
    prompt = cpu.prompt(320)
    await cpu.serve(prompt, salt="one")
    await cpu.evict()
    assert usage(await cpu.serve(prompt, salt="other")).cached_tokens == 0
    await cpu.evict()
    assert usage(await cpu.serve(prompt, salt="one")).tier_tokens == 288


async def test_many_at_once_get_their_own_kv(cpu: Worker) -> None:
    prompts = [cpu.prompt(length) for length in (40, 300, 129, 257, 64, 33)]
    alone = [await cpu.alone(prompt) for prompt in prompts]
    for prompt in prompts:
        await cpu.serve(prompt)
    await cpu.evict()
    done = await asyncio.gather(*(cpu.serve(prompt) for prompt in prompts))
    assert [each.choice().tokens for each in done] == alone
    assert [usage(each).tier_tokens for each in done] == [(len(p) - 1) // BLOCK * BLOCK for p in prompts]


async def test_a_hinted_prompt_is_fetched_while_it_waits(cpu: Worker) -> None:
    prompt = cpu.prompt(700)
    await cpu.serve(prompt)
    await cpu.evict()
    request: EngineRequest = replace(cpu.bench.request(prompt, GREEDY), tier_tokens=672)
    (done,) = await cpu.bench.run(request)
    assert usage(done).tier_tokens == 672


async def test_routers_are_told_what_host_memory_holds(cpu: Worker) -> None:
    kv = cpu.bench.engine.kv
    assert kv is not None
    held: Callable[[int, Medium], int] = kv.held  # type: ignore[attr-defined]
    await cpu.until(lambda: held(0, Medium.CPU) == cpu.tier(Medium.CPU).blocks > 0)


async def test_requests_aborted_around_their_load_leak_nothing(cpu: Worker) -> None:
    prompt = cpu.prompt(1400)
    alone = await cpu.alone(prompt)
    await cpu.serve(prompt)
    for _ in range(6):
        await cpu.evict()
        request = cpu.bench.request(prompt, GREEDY)
        cpu.bench.engine.submit([request])
        await asyncio.sleep(cpu.rng.random() * 0.01)
        cpu.bench.engine.abort([request.request_id])
        await cpu.bench.ended(request.request_id)
    assert (await cpu.serve(prompt)).choice().tokens == alone
    assert cpu.bench.engine.load().kv_usage == 0


async def test_no_engine_spins_when_nothing_runs(cpu: Worker) -> None:
    await cpu.serve(cpu.prompt(100))
    family = psutil.Process().children(recursive=True)
    before = {process.pid: sum(process.cpu_times()[:2]) for process in family}
    await asyncio.sleep(5)
    spent = [sum(process.cpu_times()[:2]) - before[process.pid] for process in family]
    assert max(spent) < 2.5, spent


async def test_after_a_failed_pull_tiers_are_asked_before_anything_is_computed(cpu: Worker) -> None:
    prompt = cpu.prompt(500)
    alone = (await cpu.serve(prompt)).choice().tokens
    await cpu.evict()
    garbled = KvHandoff("lease", 1, 10.0, 16, b"garbage")
    failed = cpu.bench.engine.load().transfers_failed
    done = await cpu.serve(prompt, leg=Leg.DECODE, handoff=garbled)
    assert done.choice().tokens == alone
    assert usage(done).tier_tokens == usage(done).cached_tokens == 480
    assert usage(done).transferred_tokens == 0
    assert cpu.bench.engine.load().transfers_failed == failed + 1


async def test_preempted_requests_are_swapped_in_or_computed_again_with_equal_tokens(
    running: Running,
) -> None:
    sampling = replace(GREEDY, max_tokens=250)
    async with running(TiersSpec(cpu=CpuTierSpec(bytes=2 << 20))) as worker:
        prompts = [worker.prompt(200) for _ in range(10)]
        alone = []
        for at in range(0, len(prompts), 4):  # as many as the device has room for
            fit = [worker.bench.request(each, sampling, salt="alone") for each in prompts[at : at + 4]]
            alone += [each.choice().tokens for each in await worker.bench.run(*fit)]
        assert worker.bench.engine.load().preemptions == 0
        done = await worker.bench.run(*(worker.bench.request(prompt, sampling) for prompt in prompts))
        assert [each.choice().tokens for each in done] == alone
        await worker.serve([7])
        load = worker.bench.engine.load()
        assert load.swapped_in > 0
        assert load.recomputed > 0
        assert load.swapped_in + load.recomputed == load.preemptions


async def test_what_one_worker_computed_another_loads_from_redis_and_serves_on_without_it(
    shared: SharedTier,
) -> None:
    redis, writer, reader = shared.redis, shared.writer, shared.reader
    assert writer.bench.identity.shared_tier == reader.bench.identity.shared_tier != ""
    prompt = writer.prompt(1400)
    first = await writer.serve(prompt)
    await writer.until(lambda: writer.tier(Medium.REMOTE).stored_blocks >= 43)
    again = await reader.serve(prompt)
    assert again.choice().tokens == first.choice().tokens == await reader.alone(prompt)
    assert usage(again).tier_tokens == 1376
    assert reader.tier(Medium.REMOTE).loaded_blocks == 43
    assert usage(await reader.serve(prompt, salt="other tenant")).cached_tokens == 0

    redis.freeze()
    fresh = [reader.prompt(300) for _ in range(4)]
    done = [await reader.serve(each) for each in fresh]
    assert all(timings(each).tier_s < 0.1 for each in done)
    redis.thaw()
    redis.kill()
    assert (await reader.serve(prompt)).choice().tokens == first.choice().tokens
    await reader.serve(reader.prompt(300))
    await reader.until(lambda: reader.tier(Medium.REMOTE).trouble != "")


async def test_an_idle_engine_says_by_itself_that_its_tier_is_well_again(shared: SharedTier) -> None:
    redis, worker = shared.redis, shared.writer
    redis.close()
    await worker.serve(worker.prompt(300))
    await worker.until(lambda: worker.tier(Medium.REMOTE).trouble != "")
    redis.start()
    async with asyncio.timeout(PATIENCE_S * 3):
        while worker.tier(Medium.REMOTE).trouble:
            await asyncio.sleep(0.05)


async def test_a_killed_worker_s_successor_loads_from_its_disk(tmp_path: Path, running: Running) -> None:
    # What is tried is what outlives the worker, and not whether a loaded machine keeps the deadline.
    disk = DiskTierSpec(path=str(tmp_path / "kv"), lookup_timeout_s=1.0)
    tiers = TiersSpec(cpu=MEMORY, disk=disk)
    others = set(psutil.Process().children(recursive=True))
    async with running(tiers) as worker:
        prompt = worker.prompt(1400)
        first = (await worker.serve(prompt)).choice().tokens
        await worker.until(lambda: worker.tier(Medium.DISK).stored_blocks >= 43)
        for process in set(psutil.Process().children(recursive=True)) - others:
            with suppress(psutil.NoSuchProcess):
                if "resource_tracker" not in command_line(process):
                    process.kill()
        await worker.bench.engine.wait_failed()
    async with running(tiers, seed=3) as successor:
        await successor.until(lambda: successor.tier(Medium.DISK).blocks >= 43)
        again = await successor.serve(prompt)
        assert again.choice().tokens == first == await successor.alone(prompt)
        assert usage(again).tier_tokens == 1376
        kv = successor.bench.engine.kv
        assert kv is not None
        held: Callable[[int, Medium], int] = kv.held  # type: ignore[attr-defined]
        await successor.until(lambda: held(0, Medium.DISK) == successor.tier(Medium.DISK).blocks)


@pytest.fixture
def one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines started from here on give all blocks one name."""
    from kvasir_workers.connector.tiers import scheduler as tier_scheduler
    from kvasir_workers.engines.vllm.setup import arguments

    # The connector is loaded in this process too, and what it does there must end with the test.
    names = vars(tier_scheduler)
    monkeypatch.setitem(names, "chain_hashes", names["chain_hashes"])
    monkeypatch.setattr(arguments, "CONNECTOR_MODULE", "one_name_connector")
    monkeypatch.syspath_prepend(HELPERS)
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), path]).rstrip(os.pathsep))


async def test_prompts_forced_onto_one_name_share_no_kv(
    one_name: None, tmp_path: Path, running: Running
) -> None:
    tiers = TiersSpec(cpu=CpuTierSpec(bytes=16 << 20), disk=DiskTierSpec(path=str(tmp_path / "kv")))
    async with running(tiers) as worker:
        prompts = [worker.prompt(700) for _ in range(3)]
        alone = [await worker.alone(prompt) for prompt in prompts]
        for _ in range(2):
            for prompt, tokens in zip(prompts, alone, strict=True):
                assert (await worker.serve(prompt)).choice().tokens == tokens
                await worker.evict()
        assert worker.tier(Medium.CPU).loaded_blocks > 0


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
