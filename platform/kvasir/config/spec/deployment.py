"""The deployment spec, `kvasir.yaml`: everything a deployment is, in one validated file.

One model tree serves the command line, the chart and the planner, and its JSON schema is dumped from
it. Each field's description is its documentation. What cannot work is refused here, with the reason,
before a process starts.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from kvasir.config.spec.admission import AdmissionSpec
from kvasir.config.spec.base import Name, Spec, is_loopback
from kvasir.config.spec.cluster import DiscoverySpec, RaySpec
from kvasir.config.spec.edge import ApiSpec, GatewaySpec, TelemetrySpec, TokenizerSpec
from kvasir.config.spec.filters import OutputFiltersSpec
from kvasir.config.spec.models import Disaggregated, FurtherModelSpec, LoraSpec, ModelSpec
from kvasir.config.spec.pools import EngineSpec, PoolSpec, SimSpec, SpeculativeSpec, check_kv_exchange
from kvasir.config.spec.routing import HealthSpec, RoutingSpec, SloSpec
from kvasir.config.spec.scaling import PoolScalingSpec, ScalingSpec
from kvasir.config.spec.tenants import TenancySpec, TenantSpec
from kvasir.config.spec.tiers import CpuTierSpec, DiskTierSpec, RedisTierSpec, TiersSpec
from kvasir.config.spec.workers import TlsSpec, TransferSpec, WorkerSpec
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
                check_kv_exchange(view.pools)
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
