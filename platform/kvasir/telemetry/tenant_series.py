"""Prometheus metrics of what tenants use, and of batches, collected at scrape time. Labels are tenant names
from the deployment spec, so cardinality is bounded; API keys and callers are never labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvasir.telemetry.families.scraped import SeriesTable, counter, gauge, single


@dataclass(slots=True)
class TenantUsage:
    """Counters of one tenant; `running` is a gauge. `refused` counts by the error code of the limit."""

    tenant: str
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    running: int = 0
    refused: dict[str, int] = field(default_factory=dict)


def added(use: TenantUsage, other: TenantUsage) -> TenantUsage:
    """Return the sum of what one tenant used in two ways."""
    refused = {
        code: use.refused.get(code, 0) + other.refused.get(code, 0) for code in use.refused | other.refused
    }
    return TenantUsage(
        use.tenant,
        use.requests + other.requests,
        use.prompt_tokens + other.prompt_tokens,
        use.output_tokens + other.output_tokens,
        use.running + other.running,
        refused,
    )


@dataclass(frozen=True, slots=True)
class RateLimitStats:
    """State of rate limits that routers share: whether the shared counters are reachable (`shared`), and how
    many decisions this router made from its own counters."""

    shared: bool
    local_decisions: int


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Usage of all tenants. `limits` is None if each router counts by itself by configuration."""

    tenants: tuple[TenantUsage, ...]
    limits: RateLimitStats | None


USAGE: SeriesTable[TenantStats] = SeriesTable(
    "kvasir_tenant_",
    ("tenant",),
    lambda stats: [((use.tenant,), use) for use in stats.tenants],
    counter("requests", "Requests accepted", "requests"),
    counter(
        "tokens",
        "Tokens used",
        lambda use: {"prompt": use.prompt_tokens, "output": use.output_tokens},
        "kind",
    ),
    counter("refused", "Requests refused by a limit of the tenant", lambda use: use.refused, "reason"),
    gauge("requests_in_flight", "Accepted requests that have not ended", "running"),
)

LIMITS: SeriesTable[TenantStats] = SeriesTable(
    "kvasir_rate_limits_",
    (),
    lambda stats: None if stats.limits is None else single(stats.limits),
    gauge("shared", "1 while routers share rate limit counters", "shared"),
    counter(
        "local_decisions",
        "Rate limit decisions that a router made from its own counters because Redis did not answer",
        "local_decisions",
    ),
)


@dataclass(slots=True)
class BatchStats:
    """Counts of one process. `lines` are by what became of them: `answered` and `failed` have a result, those
    `sent_again` found no capacity or lost their worker."""

    running: int = 0
    lines_running: int = 0
    lines: Counter[str] = field(default_factory=Counter)


BATCHES: SeriesTable[BatchStats] = SeriesTable(
    "kvasir_batch_",
    (),
    single,
    gauge("batches_running", "Batches that the process works on", "running"),
    gauge("lines_running", "Lines of batches that run", "lines_running"),
    counter("lines", "Lines of batches: answered, failed, or sent again", "lines", "outcome"),
)


@dataclass(frozen=True, slots=True)
class BudgetUse:
    """What a tenant has spent, as a fraction of each bound of its budget."""

    tenant: str
    ratios: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CostStats:
    """Seconds claimed by tenant and phase, costs of this month by tenant, budgets, and whether what is new
    could be written."""

    claimed: Mapping[str, Mapping[str, float]]
    spent: Mapping[str, float]
    budgets: Sequence[BudgetUse]
    stored: bool


CLAIMS: SeriesTable[CostStats] = SeriesTable(
    "kvasir_cost_",
    ("tenant",),
    lambda stats: [((tenant,), phases) for tenant, phases in stats.claimed.items()],
    counter(
        "claimed_seconds",
        "Time of workers that ended requests claim, by phase, before it is scaled to busy time",
        lambda phases: phases,
        "phase",
    ),
)

SPENT: SeriesTable[CostStats] = SeriesTable(
    "kvasir_cost_",
    ("tenant",),
    lambda stats: [((tenant,), cost) for tenant, cost in stats.spent.items()],
    gauge(
        "month_spent",
        "Cost of the tenant in this month (UTC), in `cost.currency`; the same at each router",
        lambda cost: cost,
    ),
)

BUDGETS: SeriesTable[CostStats] = SeriesTable(
    "kvasir_cost_",
    ("tenant",),
    lambda stats: [((use.tenant,), use.ratios) for use in stats.budgets],
    gauge("budget_ratio", "What is spent, as a fraction of the budget", lambda ratios: ratios, "bound"),
)

COST_STORE: SeriesTable[CostStats] = SeriesTable(
    "kvasir_cost_",
    (),
    single,
    gauge("stored", "1 if the last write of costs succeeded", "stored"),
)
