"""The deployment spec, `kvasir.yaml`: everything a deployment is, in one validated file.

One model tree serves the command line, the chart and the planner, and its JSON schema is dumped from
it. Each field's description is its documentation. What cannot work is refused here, with the reason,
before a process starts.
"""

from __future__ import annotations

import itertools
from typing import Literal, Self

from pydantic import Field, model_validator

from kvasir.config.spec_base import Name, Spec, is_loopback
from kvasir.config.spec_edge import DiscoverySpec, GatewaySpec, TelemetrySpec
from kvasir.config.spec_ray import RaySpec
from kvasir.config.spec_routing import HealthSpec, RoutingSpec, SloSpec
from kvasir.config.spec_tiers import CpuTierSpec, DiskTierSpec, RedisTierSpec, TiersSpec
from kvasir.config.spec_tls import TlsSpec
from kvasir.config.spec_workers import TransferSpec, WorkerSpec
from kvasir.core.requests import Role

__all__ = [
    "CpuTierSpec",
    "Deployment",
    "DiscoverySpec",
    "DiskTierSpec",
    "EngineSpec",
    "GatewaySpec",
    "HealthSpec",
    "LoraSpec",
    "ModelSpec",
    "PoolSpec",
    "RaySpec",
    "RedisTierSpec",
    "RoutingSpec",
    "SimSpec",
    "SloSpec",
    "SpeculativeSpec",
    "TelemetrySpec",
    "TiersSpec",
    "TlsSpec",
    "TransferSpec",
    "WorkerSpec",
    "is_loopback",
]


class ModelSpec(Spec):
    """Which weights to serve, and under which name."""

    source: str = "kvasir-tiny"
    """A folder in Hugging Face form, a Hugging Face id, or `kvasir-tiny`, which ships with Kvasir."""
    revision: str = "main"
    """Branch, tag or commit of a Hugging Face id."""
    served_name: str | None = None
    """The name that clients send as `model`; by default the source's last part."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and activations."""
    max_model_len: int = Field(default=4096, ge=16, le=10_000_000)
    """Prompt and output together, in tokens."""
    quantization: Literal["none", "int8"] = "none"
    """`int8` quantizes Linear weights at load, on the worker."""

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_name or self.source.rstrip("/").rsplit("/", 1)[-1]


class LoraSpec(Spec):
    """One LoRA adapter, served as a model of its own name."""

    name: Name
    path: str
    rank: int = Field(default=8, ge=1, le=512)


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
    expert_parallel: bool = False
    speculative: SpeculativeSpec | None = None
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads per rank; by default the replica's share of the machine."""
    seed: int = 0
    sim: SimSpec = SimSpec()


class PoolSpec(Spec):
    """Replicas that do the same part of the work."""

    name: Name
    role: Role
    replicas: int = Field(default=1, ge=0, le=1000)
    engine: EngineSpec = EngineSpec()
    kv_index: Literal["hybrid", "reported", "predicted"] = "hybrid"
    """How the router knows what these workers hold: what they report, what it foresees from its own
    decisions, or both, the report winning."""
    cpus: float = Field(default=0.5, gt=0)
    """CPU cores reserved in Ray for each replica."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs reserved in Ray for each replica."""


def _default_pools() -> tuple[PoolSpec, ...]:
    return (
        PoolSpec(name="prefill", role=Role.PREFILL),
        PoolSpec(name="decode", role=Role.DECODE),
    )


class Deployment(Spec):
    """The whole of `kvasir.yaml`. `Deployment()` is the embedded default."""

    version: Literal["kvasir/v1"] = "kvasir/v1"
    name: Name = "kvasir"
    model: ModelSpec = ModelSpec()
    lora: tuple[LoraSpec, ...] = ()
    disaggregation: Literal["always", "auto", "never"] = "always"
    """`always` prefills and decodes apart, `auto` follows the cost model, `never` runs a request on
    one worker."""
    pools: tuple[PoolSpec, ...] = Field(default_factory=_default_pools, min_length=1)
    transfer: TransferSpec = TransferSpec()
    tiers: TiersSpec = TiersSpec()
    worker: WorkerSpec = WorkerSpec()
    tls: TlsSpec = TlsSpec()
    routing: RoutingSpec = RoutingSpec()
    slo: tuple[SloSpec, ...] = Field(default=(SloSpec(name="default"),), min_length=1)
    gateway: GatewaySpec = GatewaySpec()
    discovery: DiscoverySpec = DiscoverySpec()
    ray: RaySpec = RaySpec()
    telemetry: TelemetrySpec = TelemetrySpec()

    def pool(self, name: str) -> PoolSpec:
        """The pool of that name; raises KeyError."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)

    @property
    def moves_kv(self) -> bool:
        """Whether engines need the connector: to hand KV to each other, or to keep it in tiers."""
        return self.disaggregated or self.tiers.configured

    @property
    def disaggregated(self) -> bool:
        """Whether KV may have to move."""
        return self.disaggregation != "never"

    @model_validator(mode="after")
    def _pools_fit(self) -> Self:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools: names must differ, found {names}")
        roles = {pool.role for pool in self.pools}
        if self.disaggregation == "always" and not {Role.PREFILL, Role.DECODE} <= roles:
            raise ValueError(
                "disaggregation: always needs a pool of role prefill and one of role decode; "
                "add the missing pool or set disaggregation: never"
            )
        if self.disaggregation == "never" and Role.BOTH not in roles:
            raise ValueError("disaggregation: never needs a pool of role both")
        if self.disaggregation == "auto" and not roles & {Role.BOTH, Role.DECODE}:
            raise ValueError("disaggregation: auto needs a pool of role decode or both")
        return self

    @model_validator(mode="after")
    def _kv_exchangeable(self) -> Self:
        if not self.disaggregated:
            return self
        first = self.pools[0]
        for pool in self.pools[1:]:
            for field in ("kind", "block_size", "kv_dtype"):
                mine, theirs = getattr(first.engine, field), getattr(pool.engine, field)
                if mine != theirs:
                    raise ValueError(
                        f"pools {first.name} and {pool.name} cannot exchange KV: "
                        f"engine.{field} is {mine} and {theirs}; make them equal"
                    )
        sizes = sorted({pool.engine.tensor_parallel_size for pool in self.pools})
        for fewer, more in itertools.pairwise(sizes):
            if more % fewer:
                raise ValueError(
                    f"pools with engine.tensor_parallel_size {fewer} and {more} cannot exchange KV; choose "
                    "sizes of which each divides the next"
                )
        return self

    @model_validator(mode="after")
    def _slo_classes_named_apart(self) -> Self:
        names = [each.name for each in self.slo]
        if len(set(names)) != len(names):
            raise ValueError(f"slo: names must differ, found {names}; rename one")
        return self

    @model_validator(mode="after")
    def _adapters_named_apart(self) -> Self:
        names = [adapter.name for adapter in self.lora]
        if len(set(names)) != len(names):
            raise ValueError(f"lora: names must differ, found {names}; rename one")
        if self.model.name in names:
            raise ValueError(
                f"lora: {self.model.name!r} is the model's served name too, so a request could not tell them "
                "apart; rename the adapter or set model.served_name"
            )
        return self

    @model_validator(mode="after")
    def _endpoints_of_known_pools(self) -> Self:
        pools = [pool.name for pool in self.pools]
        for endpoint in self.discovery.endpoints:
            if (name := endpoint.partition("=")[0]) not in pools:
                raise ValueError(
                    f"discovery: endpoint {endpoint!r} is of pool {name!r}, and the pools are "
                    f"{', '.join(pools)}; name one of them"
                )
        return self
