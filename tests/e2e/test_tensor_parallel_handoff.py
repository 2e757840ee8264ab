"""Prefill and decode on engines of different tensor-parallel sizes, on real vLLM: each rank reads its own
heads, and the tokens are those of one engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.kit.engines.bench import EngineBench, FreshPrompts, start_bench
from tests.kit.engines.recorder import Recorded
from tests.kit.models.architectures import named
from tests.kit.models.maker import make_model

from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec, PoolSpec
from kvasir.core.requests import Leg, Role, Sampling, Usage

pytestmark = [pytest.mark.slow, pytest.mark.soak]

MODEL = resolve_model("kvasir-tiny")
BLOCK = 32
CHUNK = 128
GREEDY = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)


def pool(name: str, role: Role, ranks: int) -> PoolSpec:
    engine = EngineSpec(
        block_size=BLOCK,
        kv_cache_bytes=16 << 20,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        threads=1,
        tensor_parallel_size=ranks,
    )
    return PoolSpec(name=name, role=role, engine=engine)


@asynccontextmanager
async def running(
    prefill_ranks: int, decode_ranks: int, model: Path = MODEL
) -> AsyncIterator[tuple[EngineBench, EngineBench]]:
    from kvasir_workers.engines.vllm.engine import VllmEngine

    pools = pool("prefill", Role.PREFILL, prefill_ranks), pool("decode", Role.DECODE, decode_ranks)
    spec = Deployment(model=ModelSpec(dtype="float32", max_model_len=512), pools=pools)
    engines = [VllmEngine(spec, each, model_path=str(model)) for each in pools]
    try:
        prefill, decode = await asyncio.gather(
            *(start_bench(engine, each.name) for engine, each in zip(engines, pools, strict=True))
        )
        yield prefill, decode
        assert prefill.recorder.violations + decode.recorder.violations == []
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


def usage(done: Recorded) -> Usage:
    assert done.last is not None
    assert done.last.usage is not None, done.last.error_message
    return done.last.usage


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1)])
async def test_tokens_are_those_of_one_engine_and_every_rank_moves_its_heads(
    prefill_ranks: int, decode_ranks: int
) -> None:
    prompts = FreshPrompts(random.Random(3))
    async with running(prefill_ranks, decode_ranks) as (prefill, decode):
        kv = decode.identity.kv
        assert kv.differences(prefill.identity.kv) == []
        whole_block = kv.bytes_per_block * kv.tensor_parallel_size
        for length in (2, 33, 100, 450):
            prompt = prompts.fresh(length)
            offered = await prefill.generate(prompt, GREEDY, leg=Leg.PREFILL)
            assert offered.last is not None
            assert offered.last.handoff is not None, offered.last.error_message
            apart = await decode.generate(prompt, GREEDY, leg=Leg.DECODE, handoff=offered.last.handoff)
            together = await decode.generate(prompt, GREEDY, salt="aggregated")
            assert apart.choice().tokens == together.choice().tokens
            assert usage(apart).transferred_tokens == length - 1
            assert usage(apart).transferred_bytes == -(-(length - 1) // BLOCK) * whole_block
        async with asyncio.timeout(30):
            while prefill.engine.load().kv_blocks_leased:
                await prefill.generate([7], GREEDY)


def likely(done: Recorded) -> list[float]:
    return [each.sampled.logprob for each in done.choice().logprobs]


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 1), (1, 2)])
async def test_of_ranks_that_have_the_same_latent_one_is_read(
    prefill_ranks: int, decode_ranks: int, tmp_path: Path
) -> None:
    model = make_model(named("deepseek-v3"), tmp_path / "model")
    prompts = FreshPrompts(random.Random(3))
    greedy = prompts.sampling(logprobs=1)
    async with running(prefill_ranks, decode_ranks, model) as (prefill, decode):
        kv = decode.identity.kv
        assert kv.differences(prefill.identity.kv) == []
        for length in (2, 33, 100, 450):
            prompt = prompts.fresh(length)
            offered = await prefill.generate(prompt, greedy, leg=Leg.PREFILL)
            assert offered.last is not None
            assert offered.last.handoff is not None, offered.last.error_message
            apart = await decode.generate(prompt, greedy, leg=Leg.DECODE, handoff=offered.last.handoff)
            together = await decode.generate(prompt, greedy, salt="aggregated")
            # The last token of a prompt has another kernel if it is computed alone.
            assert likely(apart) == pytest.approx(likely(together), abs=1e-3)
            assert usage(apart).transferred_tokens == length - 1
            blocks = -(-(length - 1) // kv.block_size)
            assert usage(apart).transferred_bytes == blocks * kv.bytes_per_block * decode_ranks
        async with asyncio.timeout(30):
            while prefill.engine.load().kv_blocks_leased:
                await prefill.generate([7], GREEDY)
