"""The deployment spec, `kvasir.yaml`: the whole configuration of a deployment in one validated file.

The command line, the chart and the planner use the same models, from which the JSON schema is generated. The
docstring of a field is its documentation. A spec that cannot work is rejected here, before a process starts.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from kvasir.config.spec.admission import AdmissionSpec
from kvasir.config.spec.base import Name, Spec, is_loopback
from kvasir.config.spec.cluster import DiscoverySpec, RaySpec
from kvasir.config.spec.edge import ApiSpec, GatewaySpec, TelemetrySpec, TokenizerSpec
from kvasir.config.spec.filters import OutputFiltersSpec
from kvasir.config.spec.models import (
    Disaggregated,
    FurtherModelSpec,
    LoadSpec,
    LoraLoadingSpec,
    LoraSpec,
    ModelSpec,
)
from kvasir.config.spec.pools import (
    EngineSpec,
    ExpertBalancingSpec,
    PoolSpec,
    SimSpec,
    SpeculationStep,
    SpeculativeSpec,
    TopologySpec,
    check_kv_exchange,
)
from kvasir.config.spec.routing import HealthSpec, PerformanceSpec, RoutingSpec, SloSpec
from kvasir.config.spec.scaling import PoolScalingSpec, ScalingSpec
from kvasir.config.spec.tenants import BudgetSpec, CostSpec, TenancySpec, TenantSpec
from kvasir.config.spec.tiers import CpuTierSpec, DiskTierSpec, RedisTierSpec, TiersSpec
from kvasir.config.spec.traffic.regions import RegionsSpec
from kvasir.config.spec.traffic.route_checks import routes_problem
from kvasir.config.spec.traffic.routes import RouteSpec
from kvasir.config.spec.workers import LinkSpec, LinksSpec, TlsSpec, TransferSpec, WorkerSpec
from kvasir.core.requests import Role

__all__ = [
    "AdmissionSpec",
    "ApiSpec",
    "BudgetSpec",
    "CostSpec",
    "CpuTierSpec",
    "Deployment",
    "DiscoverySpec",
    "DiskTierSpec",
    "EngineSpec",
    "ExpertBalancingSpec",
    "FurtherModelSpec",
    "GatewaySpec",
    "HealthSpec",
    "LinkSpec",
    "LinksSpec",
    "LoadSpec",
    "LoraLoadingSpec",
    "LoraSpec",
    "ModelSpec",
    "OutputFiltersSpec",
    "PerformanceSpec",
    "PoolScalingSpec",
    "PoolSpec",
    "RaySpec",
    "RedisTierSpec",
    "RouteSpec",
    "RoutingSpec",
    "ScalingSpec",
    "SimSpec",
    "SloSpec",
    "SpeculationStep",
    "SpeculativeSpec",
    "TelemetrySpec",
    "TenancySpec",
    "TenantSpec",
    "TiersSpec",
    "TlsSpec",
    "TokenizerSpec",
    "TopologySpec",
    "TransferSpec",
    "WorkerSpec",
    "is_loopback",
]


def _default_pools(before: dict[str, Any]) -> tuple[PoolSpec, ...]:
    """Return the pools of a spec that names none, from its valid fields above `pools`."""
    if before.get("disaggregation") == "never":
        return (PoolSpec(name="serve", role=Role.BOTH),)
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
    lora_loading: LoraLoadingSpec = LoraLoadingSpec()
    models: tuple[FurtherModelSpec, ...] = Field(default=(), max_length=64)
    """Additional models behind the same gateway, each with its own pools."""
    routes: tuple[RouteSpec, ...] = Field(default=(), max_length=64)
    """Further names that clients can send as `model`: aliases, splits, canaries. See docs/TRAFFIC.md."""
    regions: RegionsSpec | None = None
    """Other cells, in other regions, that serve requests together with this one. See docs/REGIONS.md."""
    ready_when: Literal["every_model", "any_model"] = "every_model"
    """When the gateway first becomes ready: when every model can be served, or when at least one can. From
    then on it stays ready until it stops: requests for a model without workers wait, or get 503."""
    disaggregation: Disaggregated = "always"
    """`always` runs prefill and decode on separate workers, `auto` lets the cost model decide, `never` runs a
    request on one worker. Has no effect on pools of role `embed`."""
    pools: tuple[PoolSpec, ...] = Field(default_factory=_default_pools, min_length=1)
    """Default: `prefill` and `decode` with one replica each; if `disaggregation` is `never`, `serve` of role
    `both`."""
    transfer: TransferSpec = TransferSpec()
    tiers: TiersSpec = TiersSpec()
    worker: WorkerSpec = WorkerSpec()
    tls: TlsSpec = TlsSpec()
    routing: RoutingSpec = RoutingSpec()
    admission: AdmissionSpec = AdmissionSpec()
    slo: tuple[SloSpec, ...] = Field(default=(SloSpec(name="default"),), min_length=1)
    scaling: ScalingSpec = ScalingSpec()
    performance: PerformanceSpec = PerformanceSpec()
    tenancy: TenancySpec = TenancySpec()
    cost: CostSpec = CostSpec()
    gateway: GatewaySpec = GatewaySpec()
    tokenizer: TokenizerSpec = TokenizerSpec()
    api: ApiSpec = ApiSpec()
    output_filters: OutputFiltersSpec = OutputFiltersSpec()
    discovery: DiscoverySpec = DiscoverySpec()
    ray: RaySpec = RaySpec()
    telemetry: TelemetrySpec = TelemetrySpec()

    def pool(self, name: str) -> PoolSpec:
        """Return the pool of that name. Raises KeyError."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)

    def views(self) -> tuple[Deployment, ...]:
        """Return one deployment per model, the first model first, with the adapters and pools of that model
        and everything that models share. The view of an embedding model neither moves nor stores KV."""
        if not self.models and not self.embeds:
            return (self,)
        first = self._view(self.model, self.lora, self.lora_loading, self.disaggregation)
        more = (
            self._view(each.model, each.lora, each.lora_loading, each.disaggregation or self.disaggregation)
            for each in self.models
        )
        return (first, *more)

    def view_of(self, pool: str) -> Deployment:
        """Return the view of the model that a pool serves. Raises KeyError."""
        for view in self.views():
            if any(each.name == pool for each in view.pools):
                return view
        raise KeyError(pool)

    def served_names(self) -> list[str]:
        """Return the valid values of `model` in requests: each model, followed by its adapters."""
        return [
            name for view in self.views() for name in (view.model.name, *(each.name for each in view.lora))
        ]

    @property
    def hands_kv_over(self) -> bool:
        """Whether any of the models is disaggregated."""
        return any(view.disaggregated for view in self.views())

    @property
    def embeds(self) -> bool:
        """Whether the model of a view computes embeddings only."""
        return all(pool.role is Role.EMBED for pool in self.pools)

    @property
    def moves_kv(self) -> bool:
        """Whether engines need the KV connector, for hand-offs or for tiers."""
        return self.disaggregated or self.tiers.configured

    @property
    def scales(self) -> bool:
        """Whether the planner sizes any pool."""
        return self.scaling.mode != "manual" and any(pool.scaling is not None for pool in self.pools)

    def scales_to_zero(self, pool: PoolSpec) -> bool:
        """Whether the planner may scale a pool to zero."""
        return self.scales and pool.scaling is not None and pool.scaling.min == 0

    def partner(self, name: str) -> str | None:
        """Return the pool of the same model with which the pool can exchange roles, or None. Raises
        KeyError."""
        pool, other = self.pool(name), {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
        if not self.scaling.flips or pool.scaling is None or pool.role not in other:
            return None
        like = ("model", "engine", "kv_index", "cpus", "reserved_gpus", "gpu")
        for each in self.pools:
            alike = all(getattr(each, field) == getattr(pool, field) for field in like)
            if alike and each.role is other[pool.role] and each.scaling is not None:
                return each.name
        return None

    @property
    def disaggregated(self) -> bool:
        """Whether KV may move between workers."""
        return self.disaggregation != "never"

    def _view(
        self,
        model: ModelSpec,
        lora: tuple[LoraSpec, ...],
        lora_loading: LoraLoadingSpec,
        disaggregation: Disaggregated,
    ) -> Deployment:
        pools = tuple(
            pool.model_copy(update={"model": None})
            for pool in self.pools
            if (pool.model or self.model.name) == model.name
        )
        own = {
            "model": model,
            "lora": lora,
            "lora_loading": lora_loading,
            "models": (),
            "disaggregation": disaggregation,
            "pools": pools,
        }
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
                    f"pools: {pool.name} serves unknown model {pool.model!r}; the models are "
                    f"{', '.join(names)}; name one of them"
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
            raise ValueError(f"{where}: no pool serves {name}; add one with that model")
        if Role.EMBED in roles:
            if len(roles) > 1:
                raise ValueError(
                    f"pools: {name} has pools of role embed and of other roles; an engine either computes "
                    "embeddings or generates: list its source twice, under two names"
                )
            return
        kind = view.disaggregation
        # Errors of the first model do not mention `models`: most files have a single model.
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
            raise ValueError(
                f"{what} needs a pool of role both; add one, as in `pools: [{{name: serve, role: both}}]`"
            )
        if kind == "auto" and not roles & {Role.BOTH, Role.DECODE}:
            raise ValueError(f"{what} needs a pool of role decode or both")

    @model_validator(mode="after")
    def _sleep_together(self) -> Self:
        for view in self.views():
            never = [pool.name for pool in view.pools if pool.scaling is None or pool.scaling.min > 0]
            if never and len(never) < len(view.pools):
                asleep = next(pool.name for pool in view.pools if pool.name not in never)
                raise ValueError(
                    f"pools: {asleep} can scale to zero (scaling.min 0) and {', '.join(never)} of the same "
                    "model cannot; a model scales to zero as a whole: set min 0 for all of its pools or "
                    "for none"
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
                    f"lora: {view.model.name!r} is also the served name of the model; rename the adapter or "
                    "set model.served_name"
                )
        return self

    @model_validator(mode="after")
    def _adapters_loadable(self) -> Self:
        for view in self.views():
            if not view.lora_loading.enabled:
                continue
            for pool in view.pools:
                if pool.role is Role.EMBED:
                    raise ValueError(
                        f"lora_loading: {view.model.name} computes embeddings, and only adapters of models "
                        "that generate are loaded at run time; list its adapters in lora"
                    )
                remote = [each for each in view.lora_loading.allow if not each.startswith("/")]
                if pool.engine.nodes > 1 and remote:
                    raise ValueError(
                        f"lora_loading.allow: an engine of pool {pool.name} spans {pool.engine.nodes} nodes, "
                        f"which all read the adapter's files; name folders that all nodes share, not "
                        f"{remote[0]}"
                    )
        return self

    @model_validator(mode="after")
    def _tenants_allowed_what_there_is(self) -> Self:
        models = {name for view in self.views() for name in (view.model.name, *(a.name for a in view.lora))}
        routes = {route.name for route in self.routes}
        if wrong := self.tenancy.unknown_name(models | routes, {each.name for each in self.slo}):
            raise ValueError(wrong)
        if wrong := self.tenancy.uncounted_budget(self.cost):
            raise ValueError(wrong)
        if wrong := self.admission.unknown_name(models, self.tenancy.priorities):
            raise ValueError(wrong)
        tenants = {tenant.name for tenant in self.tenancy.all_tenants()}
        regions = None if self.regions is None else self.regions.problem(self.name, tenants, self.tls)
        if wrong := self.output_filters.unknown_name(models, tenants) or regions:
            raise ValueError(wrong)
        if self.gateway.api_keys_redis and self.tenancy.redis is None:
            raise ValueError("gateway.api_keys_redis: there is no Redis; set tenancy.redis, or remove it")
        for issuer in self.gateway.token_issuers:
            if wrong := issuer.unknown_tenant(tenants):
                raise ValueError(wrong)
        return self

    @model_validator(mode="after")
    def _routes_lead_to_models(self) -> Self:
        wrong = routes_problem(
            self.routes,
            models=self.served_names(),
            embedding=[view.model.name for view in self.views() if view.embeds],
            slos=[each.name for each in self.slo],
            tenants={tenant.name for tenant in self.tenancy.all_tenants()},
            slo_stated="slo" in self.model_fields_set,
        )
        if wrong:
            raise ValueError(wrong)
        return self

    @model_validator(mode="after")
    def _endpoints_of_known_pools(self) -> Self:
        pools = [pool.name for pool in self.pools]
        for endpoint in self.discovery.endpoints:
            if (name := endpoint.partition("=")[0]) not in pools:
                raise ValueError(
                    f"discovery: endpoint {endpoint!r} names unknown pool {name!r}; the pools are "
                    f"{', '.join(pools)}; name one of them"
                )
        return self
