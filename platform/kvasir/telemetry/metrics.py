"""Prometheus metrics, all of them, behind one class: nobody else names a series.

Every label comes from a closed set (configured models, the vocabulary of outcomes, live workers), so the
number of series is bounded whatever clients send. Fed and scraped on one event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from kvasir.core.demand import PoolPlan
from kvasir.ports.router import Accounting, AdmissionView, RequestSummary, WorkerView
from kvasir.telemetry.accounting_series import AccountingSeries
from kvasir.telemetry.admission_series import AdmissionSeries
from kvasir.telemetry.histogram import Histogram, HistogramFamily
from kvasir.telemetry.index_series import IndexSeries, IndexStats
from kvasir.telemetry.reasons import OK, OTHER, outcome_label
from kvasir.telemetry.scaling_series import ScalingSeries
from kvasir.telemetry.tenant_series import TenantSeries, TenantStats
from kvasir.telemetry.tokenizer_series import TokenizerSeries, TokenizerStats
from kvasir.telemetry.worker_series import WorkerSeries

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
_DECISION = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
_SHARE = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
_WHOLE = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """The metrics of one process. `models` and `slos` are the names that may become labels."""

    def __init__(self, registry: CollectorRegistry, models: Iterable[str], slos: Iterable[str] = ()) -> None:
        self._registry = registry
        self._models = frozenset(models)
        self._slos = frozenset(slos)
        self._workers = WorkerSeries()
        self._index = IndexSeries()
        self._children: dict[tuple[object, ...], Counter] = {}
        registry.register(self._workers)
        registry.register(self._index)
        self._accounting = AccountingSeries()
        registry.register(self._accounting)
        self._admission = AdmissionSeries()
        registry.register(self._admission)
        self._scaling = ScalingSeries()
        registry.register(self._scaling)
        self._tenants = TenantSeries()
        registry.register(self._tenants)
        self._tokenizers = TokenizerSeries()
        registry.register(self._tokenizers)

        def family(
            name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]
        ) -> HistogramFamily:
            made = HistogramFamily(f"kvasir_{name}", text, labels, bounds)
            registry.register(made)
            return made

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> HistogramFamily:
            return family(f"{name}_seconds", text, ("model",), bounds)

        self._ttft = histogram("time_to_first_token", "Request received to first token", _LATENCY)
        self._itl = histogram("inter_token_latency", "Between two tokens of a stream", _PER_TOKEN)
        self._tpot = histogram("time_per_output_token", "Mean per token after the first", _PER_TOKEN)
        self._e2e = histogram("request_duration", "Request received to last token", _WHOLE)
        self._queue = histogram("queue", "Request received to routed", _LATENCY)
        self._prefill = histogram("prefill", "Routed to prompt computed", _LATENCY)
        self._transfer = histogram("transfer", "Decode worker's wait for KV", _LATENCY)
        self._decision = family("decision_seconds", "What choosing workers took", (), _DECISION).labels()
        self._misjudged = family(
            "cached_tokens_error_ratio",
            "Cached tokens predicted against those found, their difference as a share of the prompt",
            ("model",),
            _SHARE,
        )

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvasir_{name}", text, labels, registry=registry)

        self._requests = counter("requests", "Requests ended, by outcome", "model", "outcome")
        self._prompt = counter("prompt_tokens", "Prompt tokens", "model")
        self._output = counter("output_tokens", "Tokens generated", "model")
        self._cached = counter("cached_tokens", "Prompt tokens found in a worker's KV cache", "model")
        self._from_tiers = counter("tier_tokens", "Cached tokens that came from a tier", "model")
        self._predicted = counter("predicted_cached_tokens", "Cached tokens the router predicted", "model")
        self._moved_tokens = counter("transferred_tokens", "Prompt tokens whose KV was moved", "model")
        self._moved_bytes = counter("transferred_bytes", "KV bytes moved between workers", "model")
        self._retries = counter("retries", "Requests started again elsewhere", "model")
        self._migrations = counter("migrations", "Requests that went on after their worker was lost", "model")
        self._slo = counter(
            "slo_requests", "Requests ended, by service class and whether it was met", "slo", "met"
        )
        self._filtered = counter("output_filter_acts", "What output filters did to answers", "filter", "act")
        self._in_flight = Gauge("kvasir_requests_in_flight", "Requests being served", registry=registry)
        self._queued = Gauge("kvasir_requests_queued", "Requests waiting for a worker", registry=registry)

    def track_in_flight(self, read: Callable[[], float]) -> None:
        """Read the in-flight gauge from `read` at every scrape."""
        self._in_flight.set_function(read)

    def track_queued(self, read: Callable[[], float]) -> None:
        """Read the queue-depth gauge from `read` at every scrape."""
        self._queued.set_function(read)

    def track_index(self, read: Callable[[], IndexStats]) -> None:
        """Read the sizes of the prefix index from `read` at every scrape."""
        self._index.read = read

    def track_accounting(self, read: Callable[[], Accounting]) -> None:
        """Read what is served and what is accounted for it from `read` at every scrape."""
        self._accounting.read = read

    def track_tenants(self, read: Callable[[], TenantStats]) -> None:
        """Read what tenants have used from `read` at every scrape."""
        self._tenants.read = read

    def track_tokenizer(self, model: str, read: Callable[[], TokenizerStats]) -> None:
        """Read what the tokenizer of `model` did from `read` at every scrape."""
        self._tokenizers.read[self._model(model)] = read

    def track_certificate(self, expires_s: Callable[[], float]) -> None:
        """Read when the gateway's certificate expires (seconds since the epoch) at every scrape."""
        name = "kvasir_gateway_certificate_expiry_timestamp_seconds"
        gauge = Gauge(name, "When the gateway's certificate expires", registry=self._registry)
        gauge.set_function(expires_s)

    def track_discovery(self, stale_s: Callable[[], float]) -> None:
        """Read at every scrape for how many seconds nobody could tell which workers there are."""
        name = "kvasir_discovery_stale_seconds"
        gauge = Gauge(name, "How old the list of workers may be", registry=self._registry)
        gauge.set_function(stale_s)

    def track_scaling(
        self, read: Callable[[], Mapping[str, PoolPlan]], inactive_s: Callable[[], float]
    ) -> None:
        """Read the sizes of pools from `read` at every scrape, and how long ago the planner last answered."""
        self._scaling.read, self._scaling.inactive_s = read, inactive_s

    def track_admission(self, read: Callable[[], Mapping[str, AdmissionView]]) -> None:
        """Read what waits for each model's workers, and what is done about it, from `read` at each scrape."""
        self._admission.read = read

    def decided(self, seconds: float) -> None:
        """Count a decision that took so long."""
        self._decision.observe(seconds)

    def inter_token(self, model: str) -> Histogram:
        """The ITL series of `model`, for a caller that observes it once per delta."""
        return self._itl.labels(self._model(model))

    def request_finished(self, summary: RequestSummary) -> None:
        """Count a request that reached the router, however it ended."""
        if summary.refused:
            self.request_refused(summary.outcome, summary.model)
            return
        model = self._model(summary.model)
        self._child(self._requests, model, outcome_label(summary.outcome)).inc()
        self._durations(model, summary)
        self._quality(model, summary)
        usage = summary.usage
        for family, amount in (
            (self._prompt, usage.prompt_tokens),
            (self._output, usage.output_tokens),
            (self._cached, usage.cached_tokens),
            (self._from_tiers, usage.tier_tokens),
            (self._predicted, summary.predicted_cached_tokens),
            (self._moved_tokens, usage.transferred_tokens),
            (self._moved_bytes, usage.transferred_bytes),
            (self._retries, summary.retries),
            (self._migrations, summary.migrations),
        ):
            if amount:
                self._child(family, model).inc(amount)

    def request_refused(self, code: str, model: str | None = None) -> None:
        """Count a request that was answered without reaching the router."""
        self._child(self._requests, self._model(model), outcome_label(code)).inc()

    def filter_acted(self, name: str, act: str) -> None:
        """Count what the output filter `name` of the spec did: a text `redacted` or `ended`, one
        `released_at_bound` or `ended_at_bound`, or, where its classifier did not answer, `failed_open` or
        `failed_closed`."""
        self._child(self._filtered, name, act).inc()

    def workers(self, views: Iterable[WorkerView]) -> None:
        """Take over all views at once; a worker that is not among them is gone."""
        gone = self._workers.known()
        for view in views:
            self._workers.seen(view)
            gone.discard(view.worker_id)
        for worker_id in gone:
            self._workers.gone(worker_id)

    def render(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return generate_latest(self._registry)

    def _model(self, name: str | None) -> str:
        return name if name in self._models else OTHER

    def _child(self, family: Counter, *labels: str) -> Counter:
        """`family.labels(*labels)`, which takes a lock and a few microseconds, looked up once."""
        key = (family, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = family.labels(*labels)
        return child

    def _quality(self, model: str, summary: RequestSummary) -> None:
        met = summary.slo_met
        if met is not None:
            slo = summary.slo.name if summary.slo.name in self._slos else OTHER
            self._child(self._slo, slo, "yes" if met else "no").inc()
        usage = summary.usage
        if summary.outcome == OK and summary.decode_worker is not None and usage.prompt_tokens:
            wrong = abs(summary.predicted_cached_tokens - usage.cached_tokens)
            self._misjudged.labels(model).observe(wrong / usage.prompt_tokens)

    def _durations(self, model: str, summary: RequestSummary) -> None:
        arrival, first = summary.arrival_s, summary.first_token_s
        if summary.routed_s is not None:
            self._queue.labels(model).observe(summary.routed_s - arrival)
            if summary.prefill_done_s is not None:
                self._prefill.labels(model).observe(summary.prefill_done_s - summary.routed_s)
        if summary.transfer_s > 0:
            self._transfer.labels(model).observe(summary.transfer_s)
        if first is not None:
            self._ttft.labels(model).observe(first - arrival)
        if summary.outcome == OK:
            self._e2e.labels(model).observe(summary.finished_s - arrival)
            if first is not None and summary.usage.output_tokens > 1:
                per_token = (summary.finished_s - first) / (summary.usage.output_tokens - 1)
                self._tpot.labels(model).observe(per_token)
