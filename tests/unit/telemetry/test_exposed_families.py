"""Exposed metric families and labels, which dashboards and alert rules depend on, equal a list."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from kvasir.core.demand import PoolForecast, PoolPlan
from kvasir.core.kv import KvState, KvStatus, Medium, TierLoad
from kvasir.core.loads.gpu import GpuLoad
from kvasir.core.locality import LinkClass
from kvasir.core.requests import EngineLoad, RouteArm, SloClass, Usage
from kvasir.native import TreeStats
from kvasir.ports.router import (
    Accounting,
    AdmissionView,
    LinkTransfers,
    RegretView,
    RequestSummary,
    WorkerView,
)
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.route_series import RolloutStats
from kvasir.telemetry.tenant_series import RateLimitStats, TenantStats, TenantUsage
from kvasir.telemetry.tokenizer_series import TokenizerStats

LISTED = Path(__file__).with_name("exposed_families.txt")
STATS = TenantStats((TenantUsage("t", refused={"rate_limited": 1}),), None)
SUMMARY = RequestSummary(
    "r",
    "m",
    "ok",
    arrival_s=1.0,
    routed_s=1.1,
    prefill_done_s=1.2,
    first_token_s=1.3,
    finished_s=2.0,
    transfer_s=0.1,
    decode_worker="w",
    predicted_cached_tokens=1,
    retries=1,
    migrations=1,
    reason="cross_role",
    usage=Usage(9, 8, 7, 6, 5, 4),
    slo=SloClass("s", 1.0, 1.0),
)


def filled() -> tuple[CollectorRegistry, Metrics]:
    """Metrics with a sample in every family except those of shared rate limits."""
    metrics = Metrics(registry := CollectorRegistry(), ["m"], ["s"])
    gpu = GpuLoad(0, sm_active=0.5, dram_active=0.5)
    load = EngineLoad(tiers=(TierLoad(Medium.CPU),), gpus=(gpu,))
    metrics.workers([WorkerView("w", "a", "p", "ready", load=load, kv=KvStatus(KvState.EXACT, "", 0.0))])
    metrics.track_index(lambda: TreeStats(*[0] * 9))
    metrics.track_accounting(lambda: Accounting(0, 0, 0, 0, 0))
    metrics.track_regret(lambda: {"m": RegretView(causes={"queue": 0.0})})
    metrics.track_rollouts(lambda: {"chat": RolloutStats(0.05, {"itl": 0.0})})
    metrics.track_links(lambda: {"m": {LinkClass.RACK: LinkTransfers()}})
    metrics.track_admission(lambda: {"m": AdmissionView()})
    metrics.track_scaling(
        lambda: {"p": PoolPlan(1, 1, 0, True, PoolForecast(1.0, 1.0, 1.0, ()))}, lambda: 0.0
    )
    metrics.track_tenants(lambda: STATS)
    metrics.track_certificate(lambda: 0.0)
    metrics.track_discovery(lambda: 0.0)
    metrics.track_tokenizer("m", lambda: TokenizerStats(fast=True))
    metrics.request_finished(SUMMARY)
    metrics.request_finished(replace(SUMMARY, slo=SloClass("s", 0.1, 1.0)))
    metrics.inter_token("m").observe(0.1)
    metrics.batches([WorkerView("w", "a", "p", "ready", load=load)], {"p": 64})
    metrics.filter_acted("f", "redacted")
    metrics.request_finished(replace(SUMMARY, route_arm=RouteArm("chat", "m")))
    metrics.route_fell_back(RouteArm("chat", "m"))
    metrics.shadowed(RouteArm("chat", "m"), "dropped")
    return registry, metrics


def listed(family: Metric) -> str:
    """A line of the list: name, type and labels of a family."""
    labels = {label for sample in family.samples for label in sample.labels if label != "le"}
    return " ".join([family.name, family.type, *sorted(labels)])


def test_every_family_is_exposed_under_its_name_type_and_labels() -> None:
    registry, metrics = filled()
    metrics.track_tenants(lambda: replace(STATS, limits=RateLimitStats(shared=True, local_decisions=0)))
    exposed = sorted(listed(family) for family in registry.collect())
    assert exposed == LISTED.read_text(encoding="utf-8").splitlines()


def test_a_family_that_is_not_tracked_is_not_exposed() -> None:
    Metrics(untracked := CollectorRegistry(), ["m"])
    exposed = [family.name for family in untracked.collect()]
    tracked = ("index", "router", "admission", "brownout", "pool_replicas", "planner", "tenant", "tokenizer")
    assert not [name for name in exposed if name.startswith(tuple(f"kvasir_{each}" for each in tracked))]
    registry, _ = filled()
    assert not [family.name for family in registry.collect() if "rate_limits" in family.name]
