"""What the router serves against what it has accounted for it, read at scrape time: a leak shows as two
series that part."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvasir.ports.router import Accounting

_GAUGES: tuple[tuple[str, str, Callable[[Accounting], int]], ...] = (
    ("legs", "Requests that run on workers", lambda accounting: accounting.running),
    (
        "accounted_requests",
        "Requests whose work is accounted on workers",
        lambda accounting: accounting.accounted,
    ),
    ("leases", "Leases on prefill workers' KV that is to be pulled", lambda accounting: accounting.leases),
    (
        "accounting_consistent",
        "1 while what is served and what is accounted agree",
        lambda accounting: accounting.consistent,
    ),
)


class AccountingSeries(Collector):
    """Yields nothing until it is told where to read."""

    def __init__(self) -> None:
        self.read: Callable[[], Accounting] | None = None

    def collect(self) -> Iterable[Metric]:
        """One family per figure."""
        if self.read is None:
            return
        accounting = self.read()
        for name, text, value in _GAUGES:
            yield GaugeMetricFamily(f"kvasir_router_{name}", text, value=value(accounting))
