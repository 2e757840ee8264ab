"""Sizes of pools as the planner wants them and as they are, read at scrape time. Every router tells the
same: what the planner said last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvasir.core.demand import PoolPlan

_GAUGES: tuple[tuple[str, str, Callable[[PoolPlan], float]], ...] = (
    ("pool_replicas_desired", "Replicas that the planner wants", lambda plan: plan.desired),
    ("pool_replicas_serving", "Replicas that serve", lambda plan: plan.serving),
    (
        "pool_replicas_starting",
        "Replicas that were asked for and do not serve yet",
        lambda plan: plan.starting,
    ),
    (
        "pool_scaling_applied",
        "1 where the desired size is applied, 0 where it is advice",
        lambda plan: plan.applied,
    ),
)


class ScalingSeries(Collector):
    """Yields nothing until it is told where to read. The pool is the only label."""

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[str, PoolPlan]] | None = None
        self.inactive_s: Callable[[], float] = lambda: 0.0

    def collect(self) -> Iterable[Metric]:
        """One family per figure."""
        if self.read is None:
            return
        plans = self.read()
        for name, text, value in _GAUGES:
            family = GaugeMetricFamily(f"kvasir_{name}", text, labels=("pool",))
            for pool, plan in plans.items():
                family.add_metric((pool,), value(plan))
            yield family
        silent = GaugeMetricFamily(
            "kvasir_planner_inactive_seconds", "Seconds since the planner last answered"
        )
        silent.add_metric((), self.inactive_s())
        yield silent
