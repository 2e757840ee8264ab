"""Every engine option of the spec, on real vLLM, with separate prefill and decode.

Two engines of one spec: the first prefills, the second decodes, which is compared with the second doing both.
Greedy; float32 wherever the power allows it. What works together shares a pair of engines.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
from tests.kit.engines.bench import EngineBench, FreshPrompts, start_bench
from tests.kit.engines.drafts import write_eagle_head, write_medusa_heads
from tests.kit.engines.recorder import Recorded
from tests.kit.shared.engines import EngineRegistry, engines_of

from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import (
    Deployment,
    EngineSpec,
    ModelSpec,
    PoolSpec,
    SpeculationStep,
    SpeculativeSpec,
)
from kvasir.core.errors import ConfigError
from kvasir.core.requests import EngineRequest, KvHandoff, Leg, Role, Sampling, token_ids

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

MODEL = resolve_model("kvasir-tiny")
BLOCK = 32
GREEDY = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)


@dataclass
class Pair:
    """Two engines of one deployment."""

    prefill: EngineBench
    decode: EngineBench

    async def apart(self, prompt: list[int], adapter: str | None = None, rank: int | None = None) -> Recorded:
        """Prefill here, decode there."""
        offered = await self._leg(self.prefill, prompt, Leg.PREFILL, adapter, rank)
        assert offered.last is not None
        assert offered.last.handoff is not None, offered.last.error_message
        handoff = offered.last.handoff
        return await self._leg(self.decode, prompt, Leg.DECODE, adapter, rank, handoff=handoff)

    async def together(self, prompt: list[int], adapter: str | None = None) -> Recorded:
        """Both on the decode engine; the salt keeps what was moved out of its reach."""
        return await self._leg(self.decode, prompt, Leg.FULL, adapter, None, salt="aggregated")

    async def _leg(
        self,
        bench: EngineBench,
        prompt: list[int],
        leg: Leg,
        adapter: str | None,
        rank: int | None,
        *,
        handoff: KvHandoff | None = None,
        salt: str = "",
    ) -> Recorded:
        request = EngineRequest(
            bench.new_id(), token_ids(prompt), GREEDY, leg, handoff, adapter, salt, data_parallel_rank=rank
        )
        (done,) = await bench.run(request)
        assert done.last is not None
        assert done.last.error is None, done.last.error_message
        return done

    async def assert_equal(self, prompt: list[int], adapter: str | None = None) -> list[int]:
        """The tokens, which are the same either way."""
        apart = await self.apart(prompt, adapter)
        together = await self.together(prompt, adapter)
        assert apart.last is not None
        assert apart.last.usage is not None
        assert apart.last.usage.transferred_bytes > 0
        assert apart.choice().tokens == together.choice().tokens
        return apart.choice().tokens


@pytest.fixture(scope="module")
def prompts() -> FreshPrompts:
    return FreshPrompts(random.Random(5))


def deployment(
    engine: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **changes: Any
) -> Deployment:
    """Prefill and decode with the same engine, but for what `decode` adds."""
    common = {
        "block_size": BLOCK,
        "kv_cache_bytes": 16 << 20,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "threads": 1,
        **(engine or {}),
    }
    changes.setdefault("model", ModelSpec(dtype="float32", max_model_len=512))
    return Deployment(
        pools=(
            PoolSpec(name="prefill", role=Role.PREFILL, engine=EngineSpec(**common)),
            PoolSpec(name="decode", role=Role.DECODE, engine=EngineSpec(**{**common, **(decode or {})})),
        ),
        **changes,
    )


@pytest.fixture
def running(tmp_path: Path, engines: EngineRegistry) -> Callable[[Deployment], Any]:
    """Starts the engines of a deployment for one test."""

    @asynccontextmanager
    async def started(spec: Deployment) -> AsyncIterator[Pair]:
        async with engines.alone(*engines_of(spec, cache_folder=tmp_path)) as benches:
            yield Pair(*benches)

    return started


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(over_nccl: Deployment, engines: EngineRegistry) -> Pair:
    """Chunked prefill and prefix caching, a LoRA adapter, and speculation on the decode engine."""
    return Pair(*await engines.running(*engines_of(over_nccl)))


async def test_chunked_prefill_and_prefix_caching(pair: Pair, prompts: FreshPrompts) -> None:
    head = prompts.fresh(300)  # more than two chunks of 128
    await pair.assert_equal(head)
    again = await pair.apart(head + prompts.fresh(40))
    assert again.last is not None
    assert again.last.usage is not None
    assert again.last.usage.cached_tokens == 288
    assert again.last.usage.transferred_bytes == 2 * pair.decode.identity.kv.bytes_per_block


@pytest.mark.soak
async def test_without_chunked_prefill_and_prefix_caching(running: Any, prompts: FreshPrompts) -> None:
    spec = deployment({"chunked_prefill": False, "prefix_caching": False, "max_num_batched_tokens": 512})
    async with running(spec) as pair:
        prompt = prompts.fresh(300)
        first, second = await pair.assert_equal(prompt), await pair.apart(prompt)
        assert second.choice().tokens == first
        assert second.last is not None
        assert second.last.usage is not None
        assert second.last.usage.cached_tokens == 0


@pytest.mark.soak
async def test_int8_weights(running: Any, prompts: FreshPrompts, tmp_path: Path) -> None:
    spec = deployment(model=ModelSpec(dtype="bfloat16", max_model_len=512, quantization="int8"))
    async with running(spec) as pair:
        await pair.assert_equal(prompts.fresh(100))
        (folder,) = (tmp_path / "int8").iterdir()
        assert "quantization_config" in json.loads((folder / "config.json").read_text())


@pytest.mark.soak
@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
async def test_fp8_kv_cache(kv_dtype: str, running: Any, prompts: FreshPrompts) -> None:
    async with running(deployment({"kv_dtype": kv_dtype})) as pair:
        kv = pair.decode.identity.kv
        assert kv.dtype == kv_dtype
        assert kv.bytes_per_block == 2 * kv.layers * kv.kv_heads * kv.head_size * BLOCK
        await pair.assert_equal(prompts.fresh(100))


async def test_ngram_speculation_changes_no_token(pair: Pair, prompts: FreshPrompts) -> None:
    phrase = prompts.fresh(12)
    await pair.assert_equal(phrase * 8)
    load = pair.decode.engine.load()
    assert load.speculated_tokens > 0
    plain, apart = await pair.prefill.generate(phrase * 8, GREEDY), await pair.apart(phrase * 8)
    assert apart.choice().tokens == plain.choice().tokens


@pytest.mark.soak
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
async def test_a_draft_changes_no_token(
    method: Literal["draft_model", "eagle", "eagle3"],
    tmp_path: Path,
    prompts: FreshPrompts,
    engines: EngineRegistry,
) -> None:
    """The model is its own draft, and every proposal accepted; EAGLE heads are of random use."""
    draft = MODEL if method == "draft_model" else write_eagle_head(MODEL, tmp_path, method)
    spec = SpeculativeSpec(method=method, model=str(draft), tokens=3)
    common: dict[str, Any] = {"kv_cache_bytes": 16 << 20, "max_num_seqs": 8, "threads": 1}
    pools = (
        PoolSpec(name="drafted", role=Role.BOTH, engine=EngineSpec(**common, speculative=spec)),
        PoolSpec(name="plain", role=Role.BOTH, engine=EngineSpec(**common)),
    )
    model = ModelSpec(dtype="float32", max_model_len=512)
    deployment = Deployment(disaggregation="never", pools=pools, model=model)
    async with engines.alone(*engines_of(deployment)) as (drafted, plain):
        for prompt in (prompts.fresh(100), prompts.fresh(3)):
            with_draft, without = await drafted.generate(prompt, GREEDY), await plain.generate(prompt, GREEDY)
            assert with_draft.choice().tokens == without.choice().tokens
        load = drafted.engine.load()
        assert load.speculated_tokens > 0
        if method == "draft_model":
            assert load.accepted_tokens >= 0.9 * load.speculated_tokens
        assert plain.engine.load().speculated_tokens == 0


@pytest.mark.soak
async def test_medusa_heads_propose_after_a_hand_off_and_change_no_token(
    tmp_path: Path, running: Any, prompts: FreshPrompts
) -> None:
    heads = write_medusa_heads(MODEL, tmp_path, 3)
    spec = SpeculativeSpec(method="medusa", model=str(heads), tokens=3)
    async with running(deployment(decode={"speculative": spec})) as pair:
        await pair.assert_equal(prompts.fresh(100))
        await pair.assert_equal(prompts.fresh(3))
        assert pair.decode.engine.load().speculated_tokens > 0


@pytest.mark.soak
async def test_larger_batches_speculate_on_fewer_tokens_and_change_none(
    prompts: FreshPrompts, engines: EngineRegistry
) -> None:
    """Equal prompts, so that all of them decode in the same steps; the model is its own draft."""
    steps = [SpeculationStep(batch=batch, tokens=tokens) for batch, tokens in ((1, 3), (2, 1), (3, 0))]
    spec = SpeculativeSpec(method="draft_model", model=str(MODEL), tokens=3, schedule=tuple(steps))
    settings: dict[str, Any] = {"kv_cache_bytes": 16 << 20, "max_num_seqs": 8, "threads": 1}
    pool = PoolSpec(name="all", role=Role.BOTH, engine=EngineSpec(**settings, speculative=spec))
    model = ModelSpec(dtype="float32", max_model_len=512)
    spec_of_all = Deployment(disaggregation="never", pools=(pool,), model=model)
    async with engines.alone(*engines_of(spec_of_all)) as (bench,):
        prompt = prompts.fresh(100)
        alone = await bench.generate(prompt, GREEDY)

        async def proposed(streams: int) -> float:
            """Tokens proposed for each stream; all streams generate equally many."""
            before = bench.engine.load().speculated_tokens
            made = await asyncio.gather(*(bench.generate(prompt, GREEDY) for _ in range(streams)))
            assert [each.choice().tokens for each in made] == [alone.choice().tokens] * streams
            return (bench.engine.load().speculated_tokens - before) / streams

        one, two, four = [await proposed(streams) for streams in (1, 2, 4)]
        assert one > two > four


async def test_lora_adapters(pair: Pair, prompts: FreshPrompts) -> None:
    assert pair.decode.identity.adapters == ("loud",)
    prompt = prompts.fresh(100)
    adapted = await pair.assert_equal(prompt, "loud")
    assert adapted != await pair.assert_equal(prompt)


async def test_preempted_requests_are_swapped_in_or_computed_again_with_equal_tokens(
    pair: Pair, prompts: FreshPrompts
) -> None:
    bench, sampling = pair.prefill, replace(GREEDY, max_tokens=250)
    asked = [prompts.fresh(200) for _ in range(16)]
    before = bench.engine.load()
    alone = []
    for at in range(0, len(asked), 8):  # as many as the device has room for
        fit = [bench.request(each, sampling, salt="alone") for each in asked[at : at + 8]]
        alone += [each.choice().tokens for each in await bench.run(*fit)]
    assert bench.engine.load().preemptions == before.preemptions
    done = await bench.run(*(bench.request(prompt, sampling) for prompt in asked))
    assert [each.choice().tokens for each in done] == alone
    await bench.generate([7], GREEDY)
    load = bench.engine.load()
    swapped_in, recomputed = load.swapped_in - before.swapped_in, load.recomputed - before.recomputed
    assert swapped_in > 0
    assert recomputed > 0
    assert swapped_in + recomputed == load.preemptions - before.preemptions


@pytest.mark.soak
async def test_tensor_parallel(running: Any, prompts: FreshPrompts) -> None:
    async with running(deployment({"tensor_parallel_size": 2})) as pair:
        kv = pair.decode.identity.kv
        assert (kv.tensor_parallel_size, kv.kv_heads) == (2, 2)
        await pair.assert_equal(prompts.fresh(100))


@pytest.mark.soak
async def test_data_parallel(running: Any, prompts: FreshPrompts) -> None:
    async with running(deployment({"data_parallel_size": 2})) as pair:
        assert pair.decode.identity.data_parallel_size == 2
        for rank in (0, 1):
            prompt = prompts.fresh(100)
            apart = await pair.apart(prompt, rank=rank)
            assert apart.choice().tokens == (await pair.together(prompt)).choice().tokens


async def test_what_this_platform_cannot_do_is_refused_at_start() -> None:
    from kvasir_workers.engines.vllm.engine import VllmEngine

    spec = deployment()
    pool = replace_engine(spec.pools[0], block_size=48)
    broken = spec.model_copy(update={"pools": (pool, spec.pools[1])})
    engine = VllmEngine(broken, pool, model_path=str(MODEL))
    with pytest.raises(ConfigError, match="block_size"):
        await start_bench(engine, "refused")


@pytest.mark.parametrize("field", ["tool_parser", "reasoning_parser"])
async def test_a_parser_whose_marks_the_model_has_not_is_refused_before_a_core_starts(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from kvasir_workers.engines.vllm.engine import VllmEngine

    monkeypatch.setattr(AsyncLLM, "from_vllm_config", lambda *_, **__: pytest.fail("a core starts"))
    name = {"tool_parser": "llama3_json", "reasoning_parser": "deepseek_r1"}[field]
    spec = deployment(decode={field: name})
    engine = VllmEngine(spec, spec.pools[1], model_path=str(MODEL))
    with pytest.raises(ConfigError, match="could not locate"):
        await start_bench(engine, "refused")


def replace_engine(pool: PoolSpec, **changes: Any) -> PoolSpec:
    return pool.model_copy(update={"engine": pool.engine.model_copy(update=changes)})
