"""A prefill engine exits while its KV is pulled, and is replaced: the decode engine keeps serving.

Real engines on the embedded model, each in its own process, with transfer.kind nccl.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.kit.engines.bench import EngineBench, FreshPrompts, start_bench
from tests.kit.engines.recorder import Recorded

from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec, PoolSpec, TransferSpec
from kvasir.core.requests import KvHandoff, Leg, Role, Sampling, Usage

pytestmark = [pytest.mark.slow, pytest.mark.soak]

MODEL = resolve_model("kvasir-tiny")
GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)


def deployment() -> Deployment:
    engine = EngineSpec(kind="vllm", block_size=32, kv_cache_bytes=64 << 20, threads=1)
    return Deployment(
        model=ModelSpec(source=str(MODEL), dtype="float32", max_model_len=2560),
        disaggregation="always",
        transfer=TransferSpec(kind="nccl"),
        pools=(
            PoolSpec(name="prefill", role=Role.PREFILL, engine=engine),
            PoolSpec(name="decode", role=Role.DECODE, engine=engine),
        ),
    )


class Engines:
    """Engines that were started; all are stopped in the end."""

    def __init__(self) -> None:
        self._benches: list[EngineBench] = []

    async def start(self, pool: str) -> tuple[EngineBench, set[int]]:
        """One more engine, and the processes that it runs in."""
        from kvasir_workers.engines.vllm.engine import VllmEngine

        before = {child.pid for child in multiprocessing.active_children()}
        spec = deployment()
        engine = VllmEngine(spec, spec.pool(pool), model_path=str(MODEL))
        bench = await start_bench(engine, f"{pool}-{len(self._benches)}")
        self._benches.append(bench)
        after = {child.pid for child in multiprocessing.active_children()}
        return bench, {pid for pid in after - before if pid is not None}

    async def stop(self) -> None:
        await asyncio.gather(*(bench.engine.stop() for bench in self._benches))


@pytest_asyncio.fixture
async def engines() -> AsyncIterator[Engines]:
    pytest.importorskip("vllm")
    started = Engines()
    yield started
    await started.stop()


async def handed_over(prefill: EngineBench, tokens: list[int]) -> KvHandoff:
    done = await prefill.generate(tokens, GREEDY, leg=Leg.PREFILL)
    assert done.last is not None
    assert done.last.handoff is not None, done.last.error_message
    return done.last.handoff


def usage(done: Recorded) -> Usage:
    assert done.last is not None
    assert done.last.usage is not None
    return done.last.usage


async def alone(decode: EngineBench, tokens: list[int]) -> list[int]:
    """What one engine makes of it, on KV of its own: the salt hides what was pulled."""
    done = await decode.generate(tokens, GREEDY, salt="alone")
    return done.choice().tokens


async def moved(prefill: EngineBench, decode: EngineBench, tokens: list[int]) -> None:
    """A request whose KV comes from the prefill engine, with the tokens that it should have."""
    done = await decode.generate(tokens, GREEDY, leg=Leg.DECODE, handoff=await handed_over(prefill, tokens))
    assert usage(done).transferred_tokens == len(tokens) - 1
    assert done.choice().tokens == await alone(decode, tokens)


async def test_a_prefill_engine_that_dies_in_mid_transfer_is_replaced_while_decode_serves_on(
    engines: Engines,
) -> None:
    prompts = FreshPrompts(random.Random(3))
    decode, decoding = await engines.start("decode")
    prefill, processes = await engines.start("prefill")
    await moved(prefill, decode, prompts.fresh(500))

    tokens = prompts.fresh(1500)
    handoff = await handed_over(prefill, tokens)
    failed = decode.engine.load().transfers_failed
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    request = decode.request(tokens, GREEDY, leg=Leg.DECODE, handoff=handoff)
    decode.engine.submit([request])
    # The other request is answered while this one waits for its KV, so the pull is under way.
    await alone(decode, prompts.fresh(40))
    for process in processes:
        os.kill(process, signal.SIGKILL)
    done = await decode.ended(request.request_id)
    assert usage(done).transferred_bytes == 0
    assert done.choice().tokens == await alone(decode, tokens)
    assert decode.engine.load().transfers_failed == failed + 1

    successor, _ = await engines.start("prefill")
    await moved(successor, decode, prompts.fresh(700))
    assert decode.engine.load().transfers_failed == failed + 1
    assert decoding <= {child.pid for child in multiprocessing.active_children()}
