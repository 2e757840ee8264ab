"""All Prometheus metrics, behind one class: no other module names a metric.

Every label comes from a closed set (configured models, the vocabulary of outcomes, live workers), so the
number of series is bounded whatever clients send. Updated and scraped on one event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from kvasir.core.demand import PoolPlan
from kvasir.core.requests import RouteArm
from kvasir.ports.router import Accounting, AdmissionView, CellView, RegretView, RequestSummary, WorkerView
from kvasir.telemetry.families.scraped import MetricDefinition, SeriesCollector, SeriesTable
from kvasir.telemetry.families.updated import CounterFamily, Histogram, HistogramFamily
from kvasir.telemetry.reasons import OTHER
from kvasir.telemetry.request_series import PER_TOKEN, RequestSeries
from kvasir.telemetry.route_series import ROLLOUTS, RolloutStats, RouteSeries
from kvasir.telemetry.router_series import (
    ACCOUNTING,
    ADMISSION,
    CELLS,
    FORECASTS,
    INDEX,
    LINKS,
    PLANNER,
    POOLS,
    REGRET,
    IndexStats,
    ScalingStats,
    TransfersByLink,
)
from kvasir.telemetry.tenant_series import (
    BATCHES,
    BUDGETS,
    CLAIMS,
    COST_STORE,
    LIMITS,
    SPENT,
    USAGE,
    BatchStats,
    CostStats,
    TenantStats,
)
from kvasir.telemetry.tokenizer_series import TOKENIZERS, TokenizerStats
from kvasir.telemetry.worker_series import WORKERS

S = TypeVar("S")

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = b"application/openmetrics-text"
OPENMETRICS_TYPE = b"application/openmetrics-text; version=1.0.0; charset=utf-8"
_END = b"# EOF\n"
"""The last line of OpenMetrics."""

_DECISION = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
_FULL = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class _Shown(Collector):
    """A metric as what is rendered at once."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> tuple[Metric]:
        return (self._metric,)


class Metrics:
    """The metrics of one process. `models` and `slos` are the allowed label values; others become `other`."""

    def __init__(self, registry: CollectorRegistry, models: Iterable[str], slos: Iterable[str] = ()) -> None:
        self._registry = registry
        self._models, self._slos = frozenset(models), frozenset(slos)
        self._views: dict[str, WorkerView] = {}
        self._tokenizers: dict[str, Callable[[], TokenizerStats]] = {}
        self._definitions: list[MetricDefinition] = []

        self._collector(*WORKERS).read = self._views.values
        self._index = self._collector(INDEX)
        self._accounting = self._collector(ACCOUNTING)
        self._admission = self._collector(ADMISSION)
        self._links = self._collector(LINKS)
        self._cells = self._collector(CELLS)
        self._regret = self._collector(REGRET)
        self._scaling = self._collector(POOLS, FORECASTS, PLANNER)
        self._tenants = self._collector(USAGE, LIMITS)
        self._batches = self._collector(BATCHES)
        self._tokenizer = self._collector(TOKENIZERS)
        self._costs = self._collector(CLAIMS, SPENT, BUDGETS, COST_STORE)
        self._discovery_stale_s: Callable[[], float] = lambda: 0.0
        self._requests = RequestSeries(self._model, self._slos)
        self._registry.register(self._requests)
        self._definitions += self._requests.definitions
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a stream", PER_TOKEN
        )
        text = "Duration of routing decisions"
        self._decision = self._histogram("decision_seconds", text, _DECISION, ()).labels()
        text = (
            "Requests in the batch of a worker, as a fraction of its largest batch, sampled every few seconds"
        )
        self._batches_full = self._histogram("worker_batch_usage_ratio", text, _FULL, ("pool",))
        self._filtered = self._counter("output_filter_acts", "Actions of output filters", "filter", "act")
        self._routes = RouteSeries(self._counter, self._histogram)
        self._rollouts = self._collector(ROLLOUTS)
        self._in_flight = self._gauge("requests_in_flight", "Requests in flight")
        self._queued = self._gauge("requests_queued", "Requests queued for a worker")
        self._tasks = self._gauge("event_loop_tasks", "Tasks of the event loop that runs requests")

    def track_in_flight(self, read: Callable[[], float]) -> None:
        """Read the in-flight gauge from `read` at every scrape."""
        self._in_flight.set_function(read)

    def track_queued(self, read: Callable[[], float]) -> None:
        """Read the queue-depth gauge from `read` at every scrape."""
        self._queued.set_function(read)

    def track_tasks(self, read: Callable[[], float]) -> None:
        """Read the tasks of the event loop from `read` at every scrape."""
        self._tasks.set_function(read)

    def track_index(self, read: Callable[[], IndexStats]) -> None:
        """Read the sizes of the prefix index from `read` at every scrape."""
        self._index.read = read

    def track_accounting(self, read: Callable[[], Accounting]) -> None:
        """Read the router's accounting from `read` at every scrape."""
        self._accounting.read = read

    def track_links(self, read: Callable[[], TransfersByLink]) -> None:
        """Read the KV transferred over each class of link from `read` at every scrape."""
        self._links.read = read

    def track_cells(self, read: Callable[[], Sequence[CellView]]) -> None:
        """Read the cells of a deployment over several regions from `read` at every scrape."""
        self._cells.read = read

    def track_regret(self, read: Callable[[], Mapping[str, RegretView]]) -> None:
        """Read the regret of routing decisions by model from `read` at every scrape."""
        self._regret.read = read

    def track_tenants(self, read: Callable[[], TenantStats]) -> None:
        """Read the usage of tenants from `read` at every scrape."""
        self._tenants.read = read

    def track_batches(self, read: Callable[[], BatchStats]) -> None:
        """Read the counts of batches from `read` at every scrape."""
        self._batches.read = read

    def track_costs(self, read: Callable[[], CostStats]) -> None:
        """Read costs and budgets from `read` at every scrape."""
        self._costs.read = read

    def track_tokenizer(self, model: str, read: Callable[[], TokenizerStats]) -> None:
        """Read the statistics of the tokenizer of `model` from `read` at every scrape."""
        self._tokenizers[self._model(model)] = read
        self._tokenizer.read = lambda: {name: stats() for name, stats in self._tokenizers.items()}

    def track_certificate(self, expires_s: Callable[[], float]) -> None:
        """Read the expiry time of the gateway's certificate (seconds since the epoch) at every scrape."""
        name = "gateway_certificate_expiry_timestamp_seconds"
        self._gauge(name, "Expiry time of the gateway's certificate").set_function(expires_s)

    def track_discovery(self, stale_s: Callable[[], float]) -> None:
        """Read the age of the list of workers, in seconds, at every scrape; 0 while discovery answers."""
        text = "Seconds since discovery last answered; 0 while it answers"
        self._gauge("discovery_stale_seconds", text).set_function(stale_s)
        self._discovery_stale_s = stale_s

    def track_scaling(
        self, read: Callable[[], Mapping[str, PoolPlan]], inactive_s: Callable[[], float]
    ) -> None:
        """Read pool sizes, and the seconds since the planner last answered, at every scrape."""
        self._scaling.read = lambda: ScalingStats(read(), inactive_s())

    def track_admission(self, read: Callable[[], Mapping[str, AdmissionView]]) -> None:
        """Read queues, pressure and brown-out by model from `read` at every scrape."""
        self._admission.read = read

    def track_rollouts(self, read: Callable[[], Mapping[str, RolloutStats]]) -> None:
        """Read the rollouts of canaries, by route, from `read` at every scrape."""
        self._rollouts.read = read

    def scaling(self) -> ScalingStats | None:
        """Return the pool sizes that are tracked; None without a planner."""
        return None if self._scaling.read is None else self._scaling.read()

    def limits_shared(self) -> bool | None:
        """Return whether routers share rate limits; None if they do not have to."""
        stats = None if self._tenants.read is None else self._tenants.read()
        return None if stats is None or stats.limits is None else stats.limits.shared

    def running_by_tenant(self) -> dict[str, int]:
        """Return the accepted requests that have not ended, of each tenant that is tracked."""
        stats = None if self._tenants.read is None else self._tenants.read()
        return {} if stats is None else {use.tenant: use.running for use in stats.tenants}

    def discovery_stale_s(self) -> float:
        """Return the age of the list of workers in seconds; 0 while discovery answers."""
        return self._discovery_stale_s()

    def decided(self, seconds: float) -> None:
        """Observe the duration of one routing decision."""
        self._decision.observe(seconds)

    def inter_token(self, model: str) -> Histogram:
        """Return the ITL series of `model`, for callers that observe it once per delta."""
        return self._itl.labels(self._model(model))

    def request_finished(self, summary: RequestSummary) -> bool | None:
        """Count a request that reached the router, with any outcome. Return RequestSummary.slo_met."""
        if summary.refused:
            self.request_refused(summary.outcome, summary.model)
            return summary.slo_met
        if summary.route_arm is not None:
            self._routes.finished(summary, summary.route_arm)
        return self._requests.ended(summary)

    def request_refused(self, code: str, model: str | None = None) -> None:
        """Count a request that was refused before it reached the router."""
        self._requests.refused(code, model)

    def filter_acted(self, name: str, act: str) -> None:
        """Count an action of the output filter `name`: `redacted`, `ended`, `released_at_bound`,
        `ended_at_bound`, or, if its classifier did not answer, `failed_open` or `failed_closed`."""
        self._filtered.add((name, act))

    def route_fell_back(self, given_up: RouteArm) -> None:
        """Count a request that another model of the route takes over from this arm."""
        self._routes.fell_back(given_up)

    def shadowed(self, arm: RouteArm, outcome: str, summary: RequestSummary | None = None) -> None:
        """Count a copy of a request for the shadow of a route: `equal`, `different`, `sampled`, `unmatched`,
        `failed` or `dropped`."""
        self._routes.shadowed(arm, outcome, summary)

    def workers(self, views: Iterable[WorkerView]) -> None:
        """Replace the views of all workers. The series of a worker that is not in `views` end."""
        self._views.clear()
        self._views.update((view.worker_id, view) for view in views)

    def batches(self, views: Iterable[WorkerView], largest: Mapping[str, int]) -> None:
        """Observe how full the batch of each worker is. `largest` is the largest batch of each pool."""
        for view in views:
            if view.load is not None and view.pool in largest:
                self._batches_full.labels(view.pool).observe(view.load.running / largest[view.pool])

    def render(self) -> bytes:
        """Render all metrics in the text exposition format, version 0.0.4."""
        return b"".join(self.parts())

    def parts(self) -> Iterator[bytes]:
        """Yield what `render` returns, metric by metric: of a large fleet it is as much as streams would have
        to wait for. Each metric has its values of when it is taken."""
        for metric in self._registry.collect():
            yield generate_latest(_Shown(metric))

    def openmetrics_parts(self) -> Iterator[bytes]:
        """Yield all metrics as OpenMetrics 1.0.0, with exemplars, metric by metric."""
        for metric in self._registry.collect():
            # The names need no escaping, for which every character would be looked at.
            shown: bytes = generate_openmetrics(_Shown(metric), escaping=ALLOWUTF8)  # type: ignore[no-untyped-call]
            yield shown.removesuffix(_END)
        yield _END

    def definitions(self) -> tuple[MetricDefinition, ...]:
        """Return the definitions of all metrics, by name, tracked or not, but for the certificate and
        discovery, which have to be tracked."""
        return tuple(sorted(self._definitions, key=lambda each: each.name))

    def _collector(self, *tables: SeriesTable[S]) -> SeriesCollector[S]:
        made = SeriesCollector(*tables)
        self._registry.register(made)
        self._definitions += [each for table in tables for each in table.definitions()]
        return made

    def _histogram(
        self, name: str, text: str, bounds: tuple[float, ...], labels: tuple[str, ...] = ("model",)
    ) -> HistogramFamily:
        made = HistogramFamily(f"kvasir_{name}", text, labels, bounds)
        self._registry.register(made)
        self._definitions.append(MetricDefinition.of(f"kvasir_{name}", "histogram", labels, text))
        return made

    def _counter(self, name: str, text: str, *labels: str) -> CounterFamily:
        made = CounterFamily(f"kvasir_{name}", text, labels)
        self._registry.register(made)
        self._definitions.append(MetricDefinition.of(f"kvasir_{name}", "counter", labels, text))
        return made

    def _gauge(self, name: str, text: str) -> Gauge:
        self._definitions.append(MetricDefinition.of(f"kvasir_{name}", "gauge", (), text))
        return Gauge(f"kvasir_{name}", text, registry=self._registry)

    def _model(self, name: str | None) -> str:
        return name if name in self._models else OTHER
