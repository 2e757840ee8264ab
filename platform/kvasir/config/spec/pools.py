"""The deployment spec's part about pools: what their replicas do, and how each runs its engine."""

from __future__ import annotations

import itertools
from typing import Literal, Self

from pydantic import Field, model_validator

from kvasir.config.spec.base import Name, Spec
from kvasir.config.spec.scaling import PoolScalingSpec
from kvasir.core.requests import Role


class SpeculativeSpec(Spec):
    """Speculative decoding by prompt look-up (n-gram), which needs no draft model."""

    method: Literal["ngram"] = "ngram"
    tokens: int = Field(default=4, ge=1, le=16)
    """Tokens proposed a step."""
    lookup_max: int = Field(default=4, ge=1, le=32)
    lookup_min: int = Field(default=2, ge=1, le=32)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.lookup_min > self.lookup_max:
            raise ValueError("lookup_min must not exceed lookup_max")
        return self


class SimSpec(Spec):
    """Timing of the simulated engine; the defaults resemble a small model on a CPU."""

    prefill_tokens_per_s: float = Field(default=20_000.0, gt=0)
    decode_step_s: float = Field(default=0.004, ge=0)
    decode_step_per_seq_s: float = Field(default=0.0002, ge=0)
    transfer_bytes_per_s: float = Field(default=2e9, gt=0)
    transfer_latency_s: float = Field(default=0.002, ge=0)


class EngineSpec(Spec):
    """How each replica of a pool runs the model."""

    kind: Literal["vllm", "sim"] = "vllm"
    """`sim` answers deterministic text with the timing of `sim`, for load and fault tests."""
    block_size: int = Field(default=32, ge=1, le=1024)
    """KV block in tokens; the CPU build wants multiples of 32."""
    kv_cache_bytes: int = Field(default=128 << 20, ge=1 << 20)
    """KV memory per replica and rank."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    """Requests in one batch."""
    max_num_batched_tokens: int = Field(default=2048, ge=16)
    """Tokens a step may compute: the chunk of chunked prefill."""
    prefix_caching: bool = True
    kv_events: bool = True
    """Report to routers which blocks the prefix cache holds."""
    chunked_prefill: bool = True
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64)
    data_parallel_size: int = Field(default=1, ge=1, le=64)
    nodes: int = Field(default=1, ge=1, le=64)
    """Pods, or places in Ray, that each replica is spread over: tensor x pipeline ranks in equal parts, the
    ranks of one stage side by side."""
    expert_parallel: bool = False
    speculative: SpeculativeSpec | None = None
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads per rank; by default the replica's share of the machine."""
    seed: int = 0
    tool_parser: str | None = None
    """The engine's parser of the calls that this model writes, such as `hermes`. Without one only forced tool
    calls are understood: `tool_choice` required, or a function's name."""
    reasoning_parser: str | None = None
    """The engine's parser of the reasoning that this model writes, such as `qwen3`."""
    tool_strictness: Literal["auto", "function", "parameter"] = "auto"
    """How much of a call a grammar enforces. `auto`: that forced calls are calls, and the arguments of tools
    that say `strict`; `function`: that every call is one; `parameter`: also the arguments of every tool."""
    structured_outputs: Literal["auto", "xgrammar", "guidance"] = "auto"
    """What compiles schemas and grammars; `auto` takes for each request one that knows all it asks for."""
    compact_json: bool = False
    """Leave models no white space between the parts of JSON, in tool calls one character at most; small ones
    may never stop to write it."""
    sim: SimSpec = SimSpec()

    @model_validator(mode="after")
    def _spread(self) -> Self:
        ranks = self.tensor_parallel_size * self.pipeline_parallel_size
        if self.nodes > 1 and self.kind == "sim":
            raise ValueError("nodes: the simulated engine is one process; set nodes to 1")
        if self.nodes > 1 and self.data_parallel_size > 1:
            raise ValueError(
                f"nodes: {self.nodes} of them carry one engine, and data_parallel_size "
                f"{self.data_parallel_size} makes several; set it to 1 and use more replicas"
            )
        if ranks % self.nodes:
            raise ValueError(
                f"nodes: {ranks} ranks (tensor x pipeline parallel) cannot be shared equally by {self.nodes} "
                "nodes; choose a divisor of their number"
            )
        return self


class PoolSpec(Spec):
    """Replicas that do the same part of the work."""

    name: Name
    role: Role
    """What its replicas do: `prefill`, `decode` or `both`; or `embed`, for a model that makes embeddings and
    generates nothing."""
    model: str | None = None
    """The name of the model that it serves; by default the deployment's first."""
    replicas: int = Field(default=1, ge=0, le=1000)
    scaling: PoolScalingSpec | None = None
    """Between which sizes the planner keeps the pool; without it there are `replicas`, or what `kvasir scale`
    asks for."""
    engine: EngineSpec = EngineSpec()
    kv_index: Literal["hybrid", "reported", "predicted"] = "hybrid"
    """How the router knows what these workers hold: what they report, what it foresees from its own
    decisions, or both, the report winning."""
    cpus: float = Field(default=0.5, gt=0)
    """CPU cores reserved in Ray for each replica, on each of its nodes."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs reserved in Ray for each replica, on each of its nodes."""

    @model_validator(mode="after")
    def _begins_within(self) -> Self:
        scaling = self.scaling
        if scaling is not None and not scaling.min <= self.replicas <= scaling.max:
            raise ValueError(
                f"replicas: {self.name} begins with {self.replicas}, and scaling keeps it between "
                f"{scaling.min} and {scaling.max}; begin within that"
            )
        return self

    @property
    def most(self) -> int:
        """Replicas that there may be at once, without those that replace others."""
        return self.replicas if self.scaling is None else self.scaling.max


def check_kv_exchange(pools: tuple[PoolSpec, ...]) -> None:
    """Raise ValueError unless the engines of these pools can read each other's KV blocks."""
    first = pools[0]
    for pool in pools[1:]:
        for field in ("kind", "block_size", "kv_dtype"):
            mine, theirs = getattr(first.engine, field), getattr(pool.engine, field)
            if mine != theirs:
                raise ValueError(
                    f"pools {first.name} and {pool.name} cannot exchange KV: "
                    f"engine.{field} is {mine} and {theirs}; make them equal"
                )
    sizes = sorted({pool.engine.tensor_parallel_size for pool in pools})
    for fewer, more in itertools.pairwise(sizes):
        if more % fewer:
            raise ValueError(
                f"pools with engine.tensor_parallel_size {fewer} and {more} cannot exchange KV; choose "
                "sizes of which each divides the next"
            )
