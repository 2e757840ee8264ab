"""Contract of engines for pools of role embed."""

from __future__ import annotations

import math
from array import array
from collections.abc import AsyncIterator
from typing import Literal

import pytest
import pytest_asyncio
from tests.kit.engines.bench import EngineBench, FreshPrompts, start_bench
from tests.kit.engines.recorder import Recorded
from tests.kit.shared.engines import EngineRegistry, engines_of

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec, PoolSpec, SimSpec
from kvasir.core.identity import NO_KV
from kvasir.core.requests import Delta, FinishReason, Leg, Role
from kvasir_workers.engines.sim.embedding import SimEmbeddingEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")

CONTEXT = 256
DIMENSIONS = 256


def deployment(kind: Literal["sim", "vllm"]) -> Deployment:
    timing = SimSpec(prefill_tokens_per_s=1e6, decode_step_s=2e-4, decode_step_per_seq_s=0.0)
    engine = EngineSpec(
        kind=kind,
        kv_cache_bytes=32 << 20,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        threads=1,
        sim=timing,
    )
    spec = Deployment(
        model=ModelSpec(dtype="float32", max_model_len=CONTEXT),
        pools=(PoolSpec(name="vectors", role=Role.EMBED, engine=engine),),
    )
    (made,) = spec.views()
    return made


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=["sim", pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.soak])],
)
async def bench(request: pytest.FixtureRequest, engines: EngineRegistry) -> AsyncIterator[EngineBench]:
    spec = deployment(request.param)
    if request.param == "vllm":
        (running,) = await engines.running(*engines_of(spec))
        yield running
        return
    sim = SimEmbeddingEngine(spec, spec.pool("vectors"), clock=MonotonicClock())
    started = await start_bench(sim, "vectors-0")
    yield started
    await sim.stop()
    assert started.recorder.violations == []


async def embed(bench: EngineBench, tokens: list[int], leg: Leg = Leg.EMBED, salt: str = "") -> Recorded:
    return await bench.generate(tokens, FreshPrompts.greedy, leg=leg, salt=salt)


def last(recorded: Recorded) -> Delta:
    assert recorded.last is not None
    return recorded.last


def vector(recorded: Recorded) -> array[float]:
    embedding = last(recorded).embedding
    assert embedding is not None
    assert embedding.typecode == "f"
    return embedding


def cosine(one: array[float], other: array[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


async def test_identity_says_that_it_embeds_and_offers_no_kv(bench: EngineBench) -> None:
    identity = bench.identity
    assert (identity.pool, identity.role) == ("vectors", Role.EMBED)
    assert identity.max_model_len == CONTEXT
    assert (identity.kv, identity.kv_blocks, identity.reports_kv) == (NO_KV, 0, False)
    assert bench.engine.kv is None


async def test_an_input_ends_in_one_delta_with_a_vector_of_length_one(
    bench: EngineBench, prompts: FreshPrompts
) -> None:
    done = await embed(bench, prompts.fresh(40))
    assert done.deltas == 1
    assert last(done).finish is FinishReason.STOP
    found = vector(done)
    assert len(found) == DIMENSIONS
    assert cosine(found, found) == pytest.approx(1.0, abs=1e-3)
    usage = last(done).usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.output_tokens) == (40, 0)


async def test_an_input_of_the_whole_context_fits_and_one_token_more_does_not(
    bench: EngineBench, prompts: FreshPrompts
) -> None:
    assert len(vector(await embed(bench, prompts.fresh(CONTEXT)))) == DIMENSIONS
    refused = last(await embed(bench, prompts.fresh(CONTEXT + 1)))
    assert (refused.finish, refused.error) == (FinishReason.ERROR, "context_length_exceeded")


async def test_equal_inputs_have_equal_vectors_alone_and_in_a_batch(
    bench: EngineBench, prompts: FreshPrompts
) -> None:
    inputs = [prompts.fresh(length) for length in (3, 17, 64, 100)]
    alone = [vector(await embed(bench, tokens)) for tokens in inputs]
    requests = [bench.request(tokens, FreshPrompts.greedy, leg=Leg.EMBED) for tokens in inputs * 4]
    together = [vector(recorded) for recorded in await bench.run(*requests)]
    for number, found in enumerate(together):
        assert cosine(found, alone[number % len(inputs)]) == pytest.approx(1.0, abs=1e-4)
    assert cosine(alone[0], alone[1]) < 0.999


async def test_legs_that_generate_are_refused(bench: EngineBench, prompts: FreshPrompts) -> None:
    refused = last(await embed(bench, prompts.fresh(8), leg=Leg.FULL))
    assert (refused.finish, refused.error) == (FinishReason.ERROR, "invalid_request")
    assert "makes embeddings" in (refused.error_message or "")


async def test_aborted_inputs_end_with_abort_and_the_others_go_on(
    bench: EngineBench, prompts: FreshPrompts
) -> None:
    requests = [bench.request(prompts.fresh(200), FreshPrompts.greedy, leg=Leg.EMBED) for _ in range(12)]
    bench.engine.submit(requests)
    gone = [request.request_id for request in requests[6:]]
    bench.engine.abort([*gone, "unknown"])
    for request in requests:
        ended = last(await bench.recorder.wait(request.request_id))
        wanted = FinishReason.ABORT if request.request_id in gone else FinishReason.STOP
        assert ended.finish is wanted
        assert (ended.embedding is None) == (request.request_id in gone)
    load = bench.engine.load()
    assert (load.running, load.waiting) == (0, 0)


async def test_a_live_request_id_is_refused(bench: EngineBench, prompts: FreshPrompts) -> None:
    request = bench.request(prompts.fresh(100), FreshPrompts.greedy, leg=Leg.EMBED)
    bench.engine.submit([request, request])
    await bench.recorder.wait(request.request_id)
    assert [delta.request_id for delta in bench.recorder.duplicates] == [request.request_id]
