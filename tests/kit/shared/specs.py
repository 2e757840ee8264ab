"""Specs of engines that several files of tests share (tests/kit/suite/schedule.py has the order)."""

from __future__ import annotations

from typing import Any

from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec, PoolSpec, TransferSpec
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
PLAIN = apart(PLAIN_ENGINE, overlap="always")
OVER_NCCL = apart(EngineSpec(kind="vllm", block_size=BLOCK, kv_cache_bytes=64 << 20, threads=1), kind="nccl")
