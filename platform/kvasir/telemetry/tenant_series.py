"""What each tenant has used, read at scrape time. Tenants are those of the deployment spec, so their names
are few; keys and callers are never labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


@dataclass(slots=True)
class TenantUsage:
    """Counters of one tenant, but for `running`. `refused` counts by the code of the limit that was in the
    way."""

    tenant: str
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    running: int = 0
    refused: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RateLimitStats:
    """How rate limits are counted where routers share them: `shared` while they do, and questions that one
    router had to decide alone."""

    shared: bool
    local_decisions: int


@dataclass(frozen=True, slots=True)
class TenantStats:
    """All that there is to read. `limits` is None where each router counts alone by design."""

    tenants: tuple[TenantUsage, ...]
    limits: RateLimitStats | None


class TenantSeries(Collector):
    """Yields nothing until it is told where to read."""

    def __init__(self) -> None:
        self.read: Callable[[], TenantStats] | None = None

    def collect(self) -> Iterable[Metric]:
        """One family per figure."""
        if self.read is None:
            return
        figures = self.read()
        requests = CounterMetricFamily("kvasir_tenant_requests", "Requests let in", labels=("tenant",))
        tokens = CounterMetricFamily("kvasir_tenant_tokens", "Tokens used", labels=("tenant", "kind"))
        refused = CounterMetricFamily(
            "kvasir_tenant_refused",
            "Requests that a limit of the tenant's refused",
            labels=("tenant", "reason"),
        )
        running = GaugeMetricFamily(
            "kvasir_tenant_requests_in_flight", "Requests let in that have not ended", labels=("tenant",)
        )
        for use in figures.tenants:
            requests.add_metric((use.tenant,), use.requests)
            tokens.add_metric((use.tenant, "prompt"), use.prompt_tokens)
            tokens.add_metric((use.tenant, "output"), use.output_tokens)
            running.add_metric((use.tenant,), use.running)
            for code, count in use.refused.items():
                refused.add_metric((use.tenant, code), count)
        yield from (requests, tokens, refused, running)
        if figures.limits is not None:
            yield GaugeMetricFamily(
                "kvasir_rate_limits_shared",
                "1 while routers count rate limits together",
                figures.limits.shared,
            )
            yield CounterMetricFamily(
                "kvasir_rate_limits_local_decisions",
                "Questions of rate limits that a router decided by its own count while it could not ask",
                figures.limits.local_decisions,
            )
