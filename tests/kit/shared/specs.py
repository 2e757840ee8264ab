"""Specs of engines that several files of tests share (tests/kit/suite/schedule.py has the order)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvasir.config.spec.deployment import (
    Deployment,
    EngineSpec,
    LoraSpec,
    ModelSpec,
    PoolSpec,
    SpeculativeSpec,
    TransferSpec,
)
from kvasir.config.spec.tiers import CpuTierSpec, TiersSpec
from kvasir.core.requests import Role

BLOCK = 32
CONTEXT = 2560
CHUNK = 128


def apart(engine: EngineSpec, decode: EngineSpec | None = None, **transfer: Any) -> Deployment:
    """A prefill and a decode pool of kvasir-tiny with this engine, or that of `decode`. float32, so that the
    shape of a batch never decides between two tokens."""
    return Deployment(
        model=ModelSpec(dtype="float32", max_model_len=CONTEXT),
        disaggregation="always",
        transfer=TransferSpec.model_validate(transfer),
        pools=(
            PoolSpec(name="prefill", role=Role.PREFILL, engine=engine),
            PoolSpec(name="decode", role=Role.DECODE, engine=decode or engine),
        ),
    )


PLAIN_ENGINE = EngineSpec(
    kind="vllm", block_size=BLOCK, kv_cache_bytes=64 << 20, max_num_batched_tokens=CHUNK, threads=1
)
SPOKEN_ENGINE = PLAIN_ENGINE.model_copy(
    update={"tool_parser": "hermes", "reasoning_parser": "qwen3", "tool_strictness": "parameter"}
)
PLAIN = apart(PLAIN_ENGINE, SPOKEN_ENGINE, overlap="always")
"""Only the decode pool knows hermes' tools and qwen3's reasoning, which requests without parsing do not
notice."""


def over_nccl(folder: Path) -> Deployment:
    """Pools with what a deployment may combine, made in `folder`: gemma3, whose layers have interleaved
    windows; its KV over NCCL; a LoRA adapter `loud`; prompts of several chunks; n-gram speculation on the
    decode engine; and tiers so small that they hold a part of what is preempted."""
    from tests.kit.models.architectures import named
    from tests.kit.models.maker import make_adapter, make_model

    model = make_model(named("gemma3"), folder / "model")
    adapter = make_adapter(named("gemma3"), folder / "adapter")
    engine = EngineSpec(
        kind="vllm", block_size=BLOCK, kv_cache_bytes=16 << 20, max_num_batched_tokens=CHUNK, threads=1
    )
    # With adapters, vLLM wants room in a step for all that is proposed.
    speculative = SpeculativeSpec(tokens=3)
    decode = engine.model_copy(update={"speculative": speculative, "max_num_seqs": CHUNK // 4})
    made = apart(engine, decode, kind="nccl")
    return made.model_copy(
        update={
            "model": made.model.model_copy(update={"source": str(model)}),
            "lora": (LoraSpec(name="loud", path=str(adapter)),),
            "tiers": TiersSpec(cpu=CpuTierSpec(bytes=2 << 20)),
        }
    )
