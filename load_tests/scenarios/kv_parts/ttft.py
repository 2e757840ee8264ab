"""Whether loading is faster than computing: TTFT of prompts that are in Redis or on disk, compared with new
prompts, on the same real engine."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.kit.engines.bench import EngineBench, FreshPrompts, start_bench
from tests.kit.lab.redis_server import RedisServer

from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec, PoolSpec
from kvasir.config.spec.tiers import CpuTierSpec, DiskTierSpec, RedisTierSpec, TiersSpec
from kvasir.core.kv import Medium
from kvasir.core.requests import Role, Sampling
from load_tests.report import Row, median

LENGTHS = (256, 512, 1024, 2048, 3800)
BLOCK = 32
REPEATS = 9
MEMORY = CpuTierSpec(bytes=256 << 20)
ONE = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
PATIENCE_S = 60.0
QUIET_S = 0.3
Say = Callable[[str], None]
Prompts = dict[int, list[list[int]]]


class NotLoaded(AssertionError):
    """A prompt was not loaded from the tier under test."""


async def measure(*, quick: bool, say: Say) -> list[Row]:
    """Rows for Redis and for disk. Raise NotLoaded."""
    repeats = 2 if quick else REPEATS
    prompts = FreshPrompts(random.Random(1))
    with tempfile.TemporaryDirectory(prefix="kvasir-bench-ttft-") as folder:
        (Path(folder) / "disk").mkdir()
        with RedisServer(Path(folder)) as server:
            # The fetch is measured, not whether a loaded machine meets the deadline.
            redis = RedisTierSpec(url=server.url, lookup_timeout_s=1.0, timeout_s=5.0)
            disk = DiskTierSpec(path=str(Path(folder) / "disk"), lookup_timeout_s=1.0)
            # Each reader has its own prompts: after one read they are in its device's cache.
            kept = {name: _each_length(prompts, repeats) for name in ("Redis", "disk")}
            await _write(TiersSpec(cpu=MEMORY, redis=redis, disk=disk), list(kept.values()), say)
            rows = await _read("Redis", TiersSpec(cpu=MEMORY, redis=redis), kept["Redis"], prompts, say)
            return rows + await _read("disk", TiersSpec(cpu=MEMORY, disk=disk), kept["disk"], prompts, say)


async def _start(tiers: TiersSpec) -> EngineBench:
    from kvasir_workers.engines.vllm.engine import VllmEngine

    path = str(resolve_model("kvasir-tiny"))
    # Room for all prompts, so that none is evicted during the measurement.
    engine = EngineSpec(kind="vllm", block_size=BLOCK, kv_cache_bytes=1 << 30, threads=1)
    deployment = Deployment(
        model=ModelSpec(source=path, dtype="float32", max_model_len=4096),
        disaggregation="never",
        pools=(PoolSpec(name="both", role=Role.BOTH, engine=engine),),
        tiers=tiers,
    )
    return await start_bench(VllmEngine(deployment, deployment.pools[0], model_path=path), "bench-0")


async def _write(tiers: TiersSpec, batches: Sequence[Prompts], say: Say) -> None:
    """Compute all prompts on an engine whose tiers store them."""
    bench = await _start(tiers)
    blocks = 0
    try:
        for prompts in batches:
            for length, each in prompts.items():
                for prompt in each:
                    await bench.generate(prompt, ONE)
                    blocks += length // BLOCK
                    await _stored(bench, blocks)
    finally:
        await bench.engine.stop()
    say(f"{blocks} blocks are kept")


async def _stored(bench: EngineBench, blocks: int) -> None:
    """Wait until both tiers have that many blocks; the write queue is bounded."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        loads = {load.medium: load for load in bench.engine.load().tiers}
        if all(loads[each].stored_blocks >= blocks for each in (Medium.DISK, Medium.REMOTE) if each in loads):
            return
        if time.monotonic() > deadline:
            raise NotLoaded(f"{blocks} blocks should be kept: {loads}")
        await asyncio.sleep(0.02)


async def _settled(bench: EngineBench) -> None:
    """Wait until no writes happen, so that only the fetch is measured."""
    before = -1
    while (stored := sum(load.stored_blocks for load in bench.engine.load().tiers)) != before:
        before = stored
        await asyncio.sleep(QUIET_S)


async def _read(name: str, tiers: TiersSpec, kept: Prompts, prompts: FreshPrompts, say: Say) -> list[Row]:
    """Alternate stored and new prompts on an engine that has computed none of them."""
    fresh = _each_length(prompts, len(kept[LENGTHS[0]]))
    bench = await _start(tiers)
    try:
        for length in LENGTHS:
            await _ttft(bench, prompts.fresh(length))
        loaded: dict[int, list[float]] = {length: [] for length in LENGTHS}
        computed: dict[int, list[float]] = {length: [] for length in LENGTHS}
        for turn in range(len(kept[LENGTHS[0]])):
            for length in LENGTHS:
                seconds, found = await _ttft(bench, kept[length][turn])
                if found == (length - 1) // BLOCK * BLOCK:
                    loaded[length].append(seconds)
                seconds, found = await _ttft(bench, fresh[length][turn])
                if found:
                    raise NotLoaded(f"{found} tokens of a new prompt came from a tier")
                computed[length].append(seconds)
                await _settled(bench)
    finally:
        await bench.engine.stop()
    rows = []
    faster = []
    for length in LENGTHS:
        asked = len(kept[length])
        if not loaded[length]:
            raise NotLoaded(f"none of {asked} prompts of {length} tokens came from {name} in time")
        value, spread = median([each * 1e3 for each in loaded[length]])
        peer, _ = median([each * 1e3 for each in computed[length]])
        say(f"{name}, {length} tokens: {value:.1f} ms, computed {peer:.1f} ms")
        if value < peer:
            faster.append(length)
        else:
            faster.clear()
        note = (
            f"{len(loaded[length])} of {asked} prompts were loaded in time; the peer computes as many tokens "
            "on the same engine"
        )
        rows.append(
            Row(
                f"ttft: from {name}, {length} tokens",
                value,
                "ms",
                "lower",
                peer=peer,
                ratio=value / peer,
                spread=spread,
                note=note,
            )
        )
    shortest = faster[0] if faster else 0
    note = "of the lengths that were measured, all longer ones are faster too; 0: none is"
    return [*rows, Row(f"ttft: from {name}, faster from", shortest, "tokens", "lower", note=note)]


async def _ttft(bench: EngineBench, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to the first token, and the number of tokens from a tier."""
    request = bench.request(prompt, ONE)
    began = time.perf_counter()
    bench.engine.submit([request])
    await bench.first_delta(request.request_id)
    seconds = time.perf_counter() - began
    done = await bench.ended(request.request_id)
    if done.last is None or done.last.usage is None:
        raise NotLoaded(f"no usage: {done.last}")
    return seconds, done.last.usage.tier_tokens


def _each_length(prompts: FreshPrompts, repeats: int) -> Prompts:
    return {length: [prompts.fresh(length) for _ in range(repeats)] for length in LENGTHS}
