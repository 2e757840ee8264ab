"""KV of several kinds between real engines, with tiny models of random weights.

float32 and one thread each, so that equal KV gives equal tokens.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.kit.engines.bench import EngineBench, FreshPrompts
from tests.kit.engines.recorder import Recorded
from tests.kit.models.architectures import named
from tests.kit.models.maker import make_model
from tests.kit.shared.engines import EngineRegistry, engines_of

from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec, PoolSpec
from kvasir.core.requests import Leg, PositionLogprobs, Role, Sampling

pytestmark = pytest.mark.slow

ROUNDING = 1e-4
GREEDY = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=5)


@dataclass
class HandedOver:
    """A prefill and a decode engine of one model."""

    prefill: EngineBench
    decode: EngineBench

    async def apart(self, prompt: list[int]) -> Recorded:
        """Prefill on one engine, decode on the other."""
        offered = await self.prefill.generate(prompt, GREEDY, leg=Leg.PREFILL)
        assert offered.last is not None
        assert offered.last.handoff is not None, offered.last.error_message
        return await self.decode.generate(prompt, GREEDY, leg=Leg.DECODE, handoff=offered.last.handoff)

    async def together(self, prompt: list[int]) -> Recorded:
        """Both on the prefill engine, on KV of its own: the salt hides what is cached."""
        return await self.prefill.generate(prompt, GREEDY, salt="aggregated")


@asynccontextmanager
async def handed_over(name: str, folder: Path, engines: EngineRegistry) -> AsyncIterator[HandedOver]:
    pytest.importorskip("vllm")
    source = make_model(named(name), folder)
    engine = EngineSpec(kv_cache_bytes=64 << 20, threads=1, max_num_batched_tokens=512, max_num_seqs=8)
    spec = Deployment(
        model=ModelSpec(source=str(source), dtype="float32", max_model_len=2048),
        disaggregation="always",
        pools=(
            PoolSpec(name="prefill", role=Role.PREFILL, engine=engine),
            PoolSpec(name="decode", role=Role.DECODE, engine=engine),
        ),
    )
    async with engines.alone(*engines_of(spec)) as pair:
        yield HandedOver(*pair)


def first_logprobs(done: Recorded, position: int = 0) -> dict[int, float]:
    """The likeliest tokens at a position of the output."""
    found: PositionLogprobs = done.choice().logprobs[position]
    return {each.token_id: each.logprob for each in found.top}


def gap(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest difference of what both have."""
    return max(abs(one[token] - other[token]) for token in one.keys() & other.keys())


@pytest.mark.asyncio(loop_scope="session")
async def test_a_model_with_interleaved_windows_is_handed_over_with_equal_tokens(
    over_nccl: Deployment, engines: EngineRegistry
) -> None:
    prompts = FreshPrompts(random.Random(5))
    pair = HandedOver(*await engines.running(*engines_of(over_nccl)))
    # Within the window of 256 tokens, beyond it, and in several steps.
    for length in (200, 500, 1300):
        prompt = prompts.fresh(length)
        apart = await pair.apart(prompt)
        assert apart.choice().tokens == (await pair.together(prompt)).choice().tokens
        assert apart.last is not None
        assert apart.last.usage is not None
        assert apart.last.usage.transferred_tokens == length - 1
        again = await pair.apart(prompt)
        assert again.choice().tokens == apart.choice().tokens
        assert again.last is not None
        assert again.last.usage is not None
        assert again.last.usage.cached_tokens


@pytest.mark.soak
@pytest.mark.asyncio(loop_scope="session")
async def test_a_latent_is_handed_over_with_the_tokens_of_one_engine(
    tmp_path: Path, engines: EngineRegistry
) -> None:
    """vLLM computes a prompt's attention with expanded keys and values, and that of a single token on the
    latent itself. A decoding engine computes the last token of the prompt alone, so with the other kernel, as
    one engine does that is given this token after the others."""
    prompts = FreshPrompts(random.Random(5))
    async with handed_over("deepseek-v3", tmp_path, engines) as pair:
        for length in (64, 350, 1000):
            prompt = prompts.fresh(length)
            apart, together = await pair.apart(prompt), await pair.together(prompt)
            forced = prompts.sampling(max_tokens=2, logprobs=5, allowed_token_ids=(prompt[-1],))
            stepped = await pair.prefill.generate(prompt[:-1], forced, salt="stepped")
            assert stepped.choice().tokens[0] == prompt[-1]
            assert gap(first_logprobs(apart), first_logprobs(stepped, 1)) < ROUNDING
            assert gap(first_logprobs(apart), first_logprobs(together)) < ROUNDING
            assert apart.choice().tokens == together.choice().tokens


@pytest.mark.soak
def test_vllm_s_rotation_of_a_latent_s_keys_depends_on_the_number_of_tokens_on_a_cpu() -> None:
    """A defect of vLLM 0.32, which models with scaled RoPE do not meet: its CPU kernel takes the heads of a
    tensor `[tokens, heads, size]` for tokens. A prompt then differs from its own prefix in one engine too."""
    torch = pytest.importorskip("torch")
    ops = pytest.importorskip("vllm._custom_ops")
    angles = torch.arange(8.0)[:, None] * torch.ones(16)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)

    def rotated(tokens: int) -> Any:
        query = torch.arange(8.0 * 4 * 32).reshape(8, 4, 32)[:tokens].clone()
        key = torch.ones(tokens, 1, 32)
        ops.rotary_embedding(torch.arange(tokens), query, key, 32, table, False)
        return query

    assert not torch.equal(rotated(8)[:4], rotated(4))
