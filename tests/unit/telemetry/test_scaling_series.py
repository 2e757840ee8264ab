"""Metrics of pool sizes: desired and actual."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvasir.core.demand import PoolForecast, PoolPlan
from kvasir.telemetry.metrics import Metrics


def test_wishes_and_acts_are_told_for_each_pool_and_nothing_without_a_planner() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, ["m"])
    assert registry.get_sample_value("kvasir_planner_inactive_seconds") is None
    metrics.track_scaling(lambda: {"decode": PoolPlan(4, 2, 1, applied=False)}, lambda: 1.5)
    of_pool = {"pool": "decode"}
    assert registry.get_sample_value("kvasir_pool_replicas_desired", of_pool) == 4
    assert registry.get_sample_value("kvasir_pool_replicas_serving", of_pool) == 2
    assert registry.get_sample_value("kvasir_pool_replicas_starting", of_pool) == 1
    assert registry.get_sample_value("kvasir_pool_scaling_applied", of_pool) == 0
    assert registry.get_sample_value("kvasir_planner_inactive_seconds") == 1.5
    assert registry.get_sample_value("kvasir_pool_load_replicas", of_pool) is None


def test_the_forecast_of_a_pool_is_shown_with_its_margin() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, ["m"])
    forecast = PoolForecast(1.5, 2.5, 3.25, ("the forecast needs 4",))
    metrics.track_scaling(lambda: {"decode": PoolPlan(4, 2, 1, True, forecast)}, lambda: 0.0)
    names = ("load_replicas", "forecast_replicas", "forecast_upper_replicas")
    shown = [registry.get_sample_value(f"kvasir_pool_{name}", {"pool": "decode"}) for name in names]
    assert shown == [1.5, 2.5, 3.25]
