"""How much waits for workers, and what is done about it, read at scrape time: pressure shows before anybody
is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvasir.ports.router import AdmissionView

_GAUGES: tuple[tuple[str, str, Callable[[AdmissionView], float]], ...] = (
    ("admission_queued", "Requests that wait for room", lambda view: view.queued),
    ("admission_parked", "Requests that wait for a worker that serves them at all", lambda view: view.parked),
    ("admission_wait_seconds", "What a typical request waits", lambda view: view.wait_s),
    ("admission_pressure", "That wait over the promised time to first token", lambda view: view.pressure),
    ("admission_tokens_per_second", "Measured throughput under load", lambda view: view.tokens_per_s),
    ("admission_reserved_tokens", "KV reserved where requests decode", lambda view: view.reserved_tokens),
    ("admission_kv_tokens", "KV that may be reserved there", lambda view: view.kv_tokens),
    ("brownout_level", "Steps of the brown-out in force", lambda view: view.brownout.level),
)


class AdmissionSeries(Collector):
    """Yields nothing until it is told where to read. The model is the only label."""

    def __init__(self) -> None:
        self.read: Callable[[], Mapping[str, AdmissionView]] | None = None

    def collect(self) -> Iterable[Metric]:
        """One family per figure."""
        if self.read is None:
            return
        views = self.read()
        for name, text, value in _GAUGES:
            family = GaugeMetricFamily(f"kvasir_{name}", text, labels=("model",))
            for model, view in views.items():
                family.add_metric((model,), value(view))
            yield family
