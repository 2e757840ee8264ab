"""The dashboard of costs: who uses the time of workers, what it costs, and what caching and idle time are."""

from __future__ import annotations

from kvasir_platform.dashboards.expressions import gauge, rate
from kvasir_platform.dashboards.fleet_boards import MODELS, POOLS, TENANTS
from kvasir_platform.dashboards.panels import Dashboard, PanelRow, chart
from kvasir_platform.dashboards.queries import gauges, rates, ratio

CLAIMED = "kvasir_cost_claimed_seconds_total"

_USE = (
    chart(
        "Time of workers that tenants claim",
        "s",
        *rates("tenant", CLAIMED),
        description="Seconds of workers in each second, before they are scaled to the time in which workers "
        "were busy. `kvasir cost` has the result.",
        stacked=True,
    ),
    chart("Time that is claimed, by phase", "s", *rates("phase", CLAIMED), stacked=True),
    chart(
        "Tokens a second",
        "short",
        (rate("kvasir_tenant_tokens_total", "tenant", "kind"), "{{tenant}} {{kind}}"),
    ),
    chart(
        "Prompt tokens that were not computed",
        "percentunit",
        ratio(rate, "kvasir_cached_tokens_total", "kvasir_prompt_tokens_total", "model"),
        description="Caches had their KV, and nobody is charged for their computation.",
    ),
)

_SPENT = (
    chart(
        "Cost of this month (UTC)",
        "short",
        *gauges("tenant", "kvasir_cost_month_spent", how="max"),
        description="In `cost.currency`. Every router knows the sum over all of them.",
    ),
    chart(
        "Spent of budgets",
        "percentunit",
        (gauge("kvasir_cost_budget_ratio", "tenant", "bound", how="max"), "{{tenant}} {{bound}}"),
        description="Above 1 of the hard bound, requests are refused with 429.",
    ),
    chart(
        "Refused because a budget is spent",
        "reqps",
        (rate("kvasir_tenant_refused_total", "tenant", reason='="budget_exceeded"'), "{{tenant}}"),
        width=8,
    ),
    chart(
        "Requests in flight per worker",
        "short",
        (f"{gauge('kvasir_worker_in_flight', 'pool')} / {gauge('kvasir_workers', 'pool')}", "{{pool}}"),
        description="Near 0, a pool is idle, which is a line of its own in `kvasir cost`.",
        width=8,
    ),
    chart("Costs are written", "bool_yes_no", *gauges("", ("kvasir_cost_stored", "written"), how="min"),
          kind="stat", width=8),
)  # fmt: skip

COST = Dashboard(
    "kvasir-cost",
    "Kvasir: cost",
    "Who uses the time of workers and what it costs: the trend within minutes. `kvasir cost` has statements.",
    (PanelRow("Use", _USE), PanelRow("Cost", _SPENT)),
    (MODELS, POOLS, TENANTS),
)
