"""Whether a model fits on a GPU, and what remains for KV.

As vLLM computes it: of the GPU's memory, `gpu_memory_utilization` is divided into weights, what a profiled
step and libraries use, CUDA graphs, and the KV cache, which must hold one request of max_model_len.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.tensors import TensorHeader
from kvasir.sizing.adapters import adapter_bytes
from kvasir.sizing.drafts import Draft, draft_bytes
from kvasir.sizing.kv import KvNeed, kv_need
from kvasir.sizing.shape import EngineShape
from kvasir.sizing.weights import WeightPart, rank_weights, weight_parts
from kvasir.sizing.working import CONTEXT_BYTES, Working, working_memory


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the files of a model say of it, and of what proposes its tokens."""

    config: ModelConfig
    weights: tuple[WeightPart, ...]
    draft: Draft | None = None


def model_files(config: ModelConfig, tensors: Iterable[TensorHeader]) -> ModelFiles:
    """Return what a model's configuration and tensor headers say of it."""
    return ModelFiles(config, weight_parts(config, tensors))


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one rank's GPU. `total` bytes, of which the engine may use the fraction `utilization`,
    or `kv_bytes` for KV beside all else if it is given."""

    total: int
    utilization: float
    kv_bytes: int | None = None

    @property
    def budget(self) -> int:
        """Bytes that weights, KV and all else may have together."""
        most = max(0, self.total - CONTEXT_BYTES)
        return most if self.kv_bytes is not None else min(int(self.total * self.utilization), most)


@dataclass(frozen=True, slots=True)
class Need:
    """What an engine needs, in bytes on a rank of each pipeline stage; `adapters` are the slots of LoRA
    adapters, and `drafts` the weights of what proposes tokens."""

    weights: tuple[int, ...]
    adapters: tuple[int, ...]
    drafts: tuple[int, ...]
    working: Working
    kv: KvNeed


@dataclass(frozen=True, slots=True)
class Fit:
    """An engine on a GPU, at the stage that has the least room. `free` is what remains for KV, below 0 if
    weights alone do not fit; `tokens` and `requests` of max_model_len have room in it. Sizes in bytes."""

    memory: RankMemory
    weights: int
    adapters: int
    drafts: int
    working: Working
    free: int
    request: int
    tokens: int
    requests: float

    @property
    def missing(self) -> int:
        """Bytes by which the engine does not fit, 0 if it fits."""
        if self.memory.kv_bytes is not None and self.free < self.memory.kv_bytes:
            return max(self.memory.kv_bytes, self.request) - self.free
        return max(0, self.request - self.kv)

    @property
    def kv(self) -> int:
        """Bytes of the KV cache."""
        return self.free if self.memory.kv_bytes is None else self.memory.kv_bytes


def need_of(files: ModelFiles, shape: EngineShape) -> Need:
    """Return what an engine of this shape needs."""
    draft = 0 if files.draft is None else draft_bytes(files.draft, files.weights, shape)
    return Need(
        weights=rank_weights(files.config, files.weights, shape),
        adapters=adapter_bytes(files.config, files.weights, shape),
        drafts=(0,) * (shape.pipeline - 1) + (draft,),
        working=working_memory(files.config, shape),
        kv=kv_need(files.config, shape, files.draft),
    )


def fit(need: Need, memory: RankMemory) -> Fit:
    """Return how `need` fits in `memory`, which each rank has."""
    held = [sum(parts) for parts in zip(need.weights, need.adapters, need.drafts, strict=True)]
    free = tuple(memory.budget - size - need.working.total for size in held)
    tightest = min(range(len(free)), key=lambda stage: free[stage] - need.kv.request_bytes[stage])
    given = free if memory.kv_bytes is None else (memory.kv_bytes,) * len(free)
    return Fit(
        memory=memory,
        weights=need.weights[tightest],
        adapters=need.adapters[tightest],
        drafts=need.drafts[tightest],
        working=need.working,
        free=free[tightest],
        request=need.kv.request_bytes[tightest],
        tokens=need.kv.tokens(given),
        requests=need.kv.requests(given),
    )
