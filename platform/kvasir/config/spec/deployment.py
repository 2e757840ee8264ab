"""The deployment spec, `kvasir.yaml`: everything a deployment is, in one validated file.

One model tree serves the command line, the chart and the planner, and its JSON schema is dumped from
it. Each field's description is its documentation. What cannot work is refused here, with the reason,
before a process starts.
"""

from __future__ import annotations

import itertools
from typing import Literal, Self

from pydantic import Field, model_validator

from kvasir.config.spec.admission import AdmissionSpec
from kvasir.config.spec.api import ApiSpec
from kvasir.config.spec.base import Name, Spec, is_loopback
from kvasir.config.spec.edge import DiscoverySpec, GatewaySpec, TelemetrySpec
from kvasir.config.spec.filters import OutputFiltersSpec
from kvasir.config.spec.models import Disaggregated, FurtherModelSpec, LoraSpec, ModelSpec
from kvasir.config.spec.ray import RaySpec
from kvasir.config.spec.routing import HealthSpec, RoutingSpec, SloSpec
from kvasir.config.spec.scaling import PoolScalingSpec, ScalingSpec
from kvasir.config.spec.tenants import TenancySpec, TenantSpec
from kvasir.config.spec.tiers import CpuTierSpec, DiskTierSpec, RedisTierSpec, TiersSpec
from kvasir.config.spec.tls import TlsSpec
from kvasir.config.spec.tokenizer import TokenizerSpec
from kvasir.config.spec.workers import TransferSpec, WorkerSpec
from kvasir.core.requests import Role

__all__ = [
    "AdmissionSpec",
    "ApiSpec",
    "CpuTierSpec",
    "Deployment",
    "DiscoverySpec",
    "DiskTierSpec",
    "EngineSpec",
    "FurtherModelSpec",
    "GatewaySpec",
    "HealthSpec",
    "LoraSpec",
    "ModelSpec",
    "OutputFiltersSpec",
    "PoolScalingSpec",
    "PoolSpec",
    "RaySpec",
    "RedisTierSpec",
    "RoutingSpec",
    "ScalingSpec",
    "SimSpec",
    "SloSpec",
    "SpeculativeSpec",
    "TelemetrySpec",
    "TenancySpec",
    "TenantSpec",
    "TiersSpec",
    "TlsSpec",
    "TokenizerSpec",
    "TransferSpec",
    "WorkerSpec",
    "is_loopback",
]


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
    models: tuple[FurtherModelSpec, ...] = Field(default=(), max_length=64)
    """More models behind the same gateway, each with pools of its own."""
    ready_when: Literal["every_model", "any_model"] = "every_model"
    """The gateway is ready when each of its models could be served at once, or when any could."""
    disaggregation: Disaggregated = "always"
    """`always` prefills and decodes apart, `auto` follows the cost model, `never` runs a request on
    one worker. Pools of role `embed` are not concerned."""
    pools: tuple[PoolSpec, ...] = Field(default_factory=_default_pools, min_length=1)
    transfer: TransferSpec = TransferSpec()
    tiers: TiersSpec = TiersSpec()
    worker: WorkerSpec = WorkerSpec()
    tls: TlsSpec = TlsSpec()
    routing: RoutingSpec = RoutingSpec()
    admission: AdmissionSpec = AdmissionSpec()
    slo: tuple[SloSpec, ...] = Field(default=(SloSpec(name="default"),), min_length=1)
    scaling: ScalingSpec = ScalingSpec()
    tenancy: TenancySpec = TenancySpec()
    gateway: GatewaySpec = GatewaySpec()
    tokenizer: TokenizerSpec = TokenizerSpec()
    api: ApiSpec = ApiSpec()
    output_filters: OutputFiltersSpec = OutputFiltersSpec()
    discovery: DiscoverySpec = DiscoverySpec()
    ray: RaySpec = RaySpec()
    telemetry: TelemetrySpec = TelemetrySpec()

    def pool(self, name: str) -> PoolSpec:
        """The pool of that name; raises KeyError."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)

    def views(self) -> tuple[Deployment, ...]:
        """For each model, the first one first, the deployment as it were with that one only: its adapters,
        its pools, and all that models share. One that makes embeddings moves and keeps no KV."""
        if not self.models and not self.embeds:
            return (self,)
        first = self._view(self.model, self.lora, self.disaggregation)
        more = (
            self._view(each.model, each.lora, each.disaggregation or self.disaggregation)
            for each in self.models
        )
        return (first, *more)

    def view_of(self, pool: str) -> Deployment:
        """The view of the model that a pool serves; raises KeyError."""
        for view in self.views():
            if any(each.name == pool for each in view.pools):
                return view
        raise KeyError(pool)

    def served_names(self) -> list[str]:
        """What clients may send as `model`: each model, and after it its adapters."""
        return [
            name for view in self.views() for name in (view.model.name, *(each.name for each in view.lora))
        ]

    @property
    def hands_kv_over(self) -> bool:
        """Whether any of its models is disaggregated."""
        return any(view.disaggregated for view in self.views())

    @property
    def embeds(self) -> bool:
        """Of a view: whether its model makes embeddings, and generates nothing."""
        return all(pool.role is Role.EMBED for pool in self.pools)

    @property
    def moves_kv(self) -> bool:
        """Whether engines need the connector: to hand KV to each other, or to keep it in tiers."""
        return self.disaggregated or self.tiers.configured

    @property
    def scales(self) -> bool:
        """Whether the planner has anything to size."""
        return self.scaling.mode != "manual" and any(pool.scaling is not None for pool in self.pools)

    def scales_to_zero(self, pool: PoolSpec) -> bool:
        """Whether the planner may leave a pool without a replica."""
        return self.scales and pool.scaling is not None and pool.scaling.min == 0

    def partner(self, name: str) -> str | None:
        """The pool of the same model whose workers can do that pool's work, and it theirs; None where there
        is none. Raises KeyError."""
        pool, other = self.pool(name), {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
        if not self.scaling.flips or pool.scaling is None or pool.role not in other:
            return None
        like = ("model", "engine", "kv_index", "cpus", "gpus")
        for each in self.pools:
            alike = all(getattr(each, field) == getattr(pool, field) for field in like)
            if alike and each.role is other[pool.role] and each.scaling is not None:
                return each.name
        return None

    @property
    def disaggregated(self) -> bool:
        """Whether KV may have to move."""
        return self.disaggregation != "never"

    def _view(
        self, model: ModelSpec, lora: tuple[LoraSpec, ...], disaggregation: Disaggregated
    ) -> Deployment:
        pools = tuple(
            pool.model_copy(update={"model": None})
            for pool in self.pools
            if (pool.model or self.model.name) == model.name
        )
        own = {"model": model, "lora": lora, "models": (), "disaggregation": disaggregation, "pools": pools}
        if all(pool.role is Role.EMBED for pool in pools):
            own |= {"disaggregation": "never", "tiers": TiersSpec()}
        return self.model_copy(update=own)

    @model_validator(mode="after")
    def _models_named_apart(self) -> Self:
        names = [view.model.name for view in self.views()]
        if len(set(names)) != len(names):
            raise ValueError(f"models: names must differ, found {names}; rename one")
        for pool in self.pools:
            if pool.model is not None and pool.model not in names:
                raise ValueError(
                    f"pools: {pool.name} serves model {pool.model!r}, and the models are {', '.join(names)}; "
                    "name one of them"
                )
        return self

    @model_validator(mode="after")
    def _pools_fit(self) -> Self:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools: names must differ, found {names}")
        for view in self.views():
            self._roles_fit(view)
        return self

    def _roles_fit(self, view: Deployment) -> None:
        roles = {pool.role for pool in view.pools}
        name = view.model.name
        if not roles:
            where = "pools" if name == self.model.name else "models"
            raise ValueError(f"{where}: no pool serves {name}; add one that names it as its model")
        if Role.EMBED in roles:
            if len(roles) > 1:
                raise ValueError(
                    f"pools: {name} makes embeddings in one pool and generates in another; an engine does "
                    "either: list its source twice, under two names"
                )
            return
        kind = view.disaggregation
        # Of the first model in the words of a file that knows of no other.
        what = (
            f"disaggregation: {kind}"
            if name == self.model.name
            else f"models: {name}: disaggregation: {kind}"
        )
        if kind == "always" and not {Role.PREFILL, Role.DECODE} <= roles:
            raise ValueError(
                f"{what} needs a pool of role prefill and one of role decode; "
                "add the missing pool or set disaggregation: never"
            )
        if kind == "never" and Role.BOTH not in roles:
            raise ValueError(f"{what} needs a pool of role both")
        if kind == "auto" and not roles & {Role.BOTH, Role.DECODE}:
            raise ValueError(f"{what} needs a pool of role decode or both")

    @model_validator(mode="after")
    def _sleep_together(self) -> Self:
        for view in self.views():
            never = [pool.name for pool in view.pools if pool.scaling is None or pool.scaling.min > 0]
            if never and len(never) < len(view.pools):
                asleep = next(pool.name for pool in view.pools if pool.name not in never)
                raise ValueError(
                    f"pools: {asleep} may have no replica (scaling.min 0) and {', '.join(never)}, of "
                    "the same model, always has one; a model sleeps as a whole: set min 0 for all of its "
                    "pools or none"
                )
        return self

    @model_validator(mode="after")
    def _kv_exchangeable(self) -> Self:
        for view in self.views():
            if view.disaggregated:
                _exchange_kv(view.pools)
        return self

    @model_validator(mode="after")
    def _slo_classes_named_apart(self) -> Self:
        names = [each.name for each in self.slo]
        if len(set(names)) != len(names):
            raise ValueError(f"slo: names must differ, found {names}; rename one")
        return self

    @model_validator(mode="after")
    def _adapters_named_apart(self) -> Self:
        names = [adapter.name for view in self.views() for adapter in view.lora]
        if len(set(names)) != len(names):
            raise ValueError(f"lora: names must differ, found {names}; rename one")
        for view in self.views():
            if view.model.name in names:
                raise ValueError(
                    f"lora: {view.model.name!r} is the model's served name too, so a request could not tell "
                    "them apart; rename the adapter or set model.served_name"
                )
        return self

    @model_validator(mode="after")
    def _tenants_allowed_what_there_is(self) -> Self:
        models = {name for view in self.views() for name in (view.model.name, *(a.name for a in view.lora))}
        if wrong := self.tenancy.unknown_name(models, {each.name for each in self.slo}):
            raise ValueError(wrong)
        if wrong := self.admission.unknown_name(models, self.tenancy.priorities):
            raise ValueError(wrong)
        tenants = {tenant.name for tenant in self.tenancy.all_tenants()}
        if wrong := self.output_filters.unknown_name(models, tenants):
            raise ValueError(wrong)
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


def _exchange_kv(pools: tuple[PoolSpec, ...]) -> None:
    """Raises ValueError unless engines of these pools can take each other's blocks."""
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
