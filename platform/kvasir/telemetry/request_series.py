"""Metric families to which requests add when they end, by model.

A request adds to over a dozen of them. One request at a time, that takes 2 % more of a router's instructions
for a short one (by hand). So they are added together: once enough have ended, and at every scrape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvasir.core.figures import Numbers
from kvasir.ports.router import RequestSummary
from kvasir.ports.routing import CROSS_ROLE
from kvasir.telemetry.families.scraped import MetricDefinition
from kvasir.telemetry.families.updated import CounterFamily, HistogramFamily
from kvasir.telemetry.missed_slo import slo_miss
from kvasir.telemetry.reasons import OK, OTHER, outcome_label
from kvasir.telemetry.spans import recorded_parent

LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
_SHARE = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
_WHOLE = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOGETHER = 64

_AMOUNTS = (
    ("prompt_tokens", "Prompt tokens", "usage.prompt_tokens"),
    ("output_tokens", "Output tokens", "usage.output_tokens"),
    ("cached_tokens", "Prompt tokens found in a worker's KV cache", "usage.cached_tokens"),
    ("predicted_cached_tokens", "Cached tokens that the router predicted", "predicted_cached_tokens"),
    ("tier_tokens", "Cached tokens that came from a tier", "usage.tier_tokens"),
    ("transferred_tokens", "Prompt tokens whose KV was transferred", "usage.transferred_tokens"),
    ("transferred_bytes", "KV bytes transferred between workers", "usage.transferred_bytes"),
    ("retries", "Requests retried before the first token", "retries"),
    ("migrations", "Requests continued on another worker after theirs was lost", "migrations"),
)
"""Counters, and what of its summary a request adds to each."""
_MOMENTS = ("arrival_s", "finished_s", "routed_s", "prefill_done_s", "first_token_s", "transfer_s")
_NUMBERS = Numbers((*_MOMENTS, *[each for *_, each in _AMOUNTS]))
_PROMPT, _OUTPUT, _CACHED, _PREDICTED = range(4)


class RequestSeries(Collector):
    """The families. `model_of` and `slos` bound the labels; models and classes that they do not have become
    `other`."""

    def __init__(self, model_of: Callable[[str | None], str], slos: Collection[str]) -> None:
        self._model_of = model_of
        self._slos = slos
        self._ended: list[tuple[RequestSummary, bool | None]] = []
        self._families: list[HistogramFamily | CounterFamily] = []
        self.definitions: list[MetricDefinition] = []
        text = "Time from request received to first token"
        self._ttft = self._histogram("time_to_first_token_seconds", text, LATENCY)
        text = "Mean time per output token after the first"
        self._tpot = self._histogram("time_per_output_token_seconds", text, PER_TOKEN)
        text = "Time from request received to last token"
        self._e2e = self._histogram("request_duration_seconds", text, _WHOLE)
        text = "Time from request received to routed"
        self._queue = self._histogram("queue_seconds", text, LATENCY)
        text = "Time from routed to prompt computed"
        self._prefill = self._histogram("prefill_seconds", text, LATENCY)
        text = "Time that the decode worker waits for KV"
        self._transfer = self._histogram("transfer_seconds", text, LATENCY)
        text = "Difference of predicted and found cached tokens, as a fraction of the prompt"
        self._misjudged = self._histogram("cached_tokens_error_ratio", text, _SHARE)
        self._requests = self._counter("requests", "Requests ended, by outcome", "outcome")
        self._amounts = [self._counter(name, text) for name, text, _ in _AMOUNTS]
        text = "Requests run whole because no worker of the right role served"
        self._cross_role = self._counter("cross_role_requests", text)
        text = "Requests ended, by SLO class and whether it was met"
        self._slo = self._counter("slo_requests", text, "slo", "met")
        text = "Requests that missed their SLO, by the promise that they broke first and what took most time"
        self._missed = self._counter("slo_missed_requests", text, "slo", "promise", "cause")

    def ended(self, summary: RequestSummary) -> bool | None:
        """Add a request that reached the router. Return RequestSummary.slo_met."""
        met = summary.slo_met
        self._ended.append((summary, met))
        if len(self._ended) >= _TOGETHER:
            self._add()
        return met

    def refused(self, code: str, model: str | None) -> None:
        """Count a request that did not reach it."""
        self._requests.add((self._model_of(model), outcome_label(code)))

    def collect(self) -> Iterable[Metric]:
        """Yield the families, with all requests that have ended."""
        self._add()
        for family in self._families:
            yield from family.collect()

    def _add(self) -> None:
        ended, self._ended = self._ended, []
        by_model: dict[str, list[tuple[RequestSummary, bool | None]]] = {}
        for each in ended:
            by_model.setdefault(each[0].model, []).append(each)
        for name, theirs in by_model.items():
            model = self._model_of(name)
            summaries = [summary for summary, _ in theirs]
            self._measure(model, summaries)
            self._count(model, theirs)
            for summary, met in theirs:
                context = summary.trace_context
                if context and (trace := trace_id_of(context, missed=met is False)):
                    self._exemplify(model, summary, trace)

    def _measure(self, model: str, summaries: Sequence[RequestSummary]) -> None:
        # Times of stages that a request did not reach are NaN, and are left out.
        numbers = _NUMBERS.of(summaries)
        arrival, finished, routed, prefilled, first, transfer = numbers[: len(_MOMENTS)]
        amounts = numbers[len(_MOMENTS) :]
        well = np.frombuffer(bytes([each.outcome == OK for each in summaries]), np.bool_)
        placed = np.frombuffer(bytes([each.decode_worker is not None for each in summaries]), np.bool_)
        prompt, later = amounts[_PROMPT], amounts[_OUTPUT] - 1
        judged = well & placed & (prompt > 0)
        by_model = (model,)
        self._queue.observe_all(by_model, routed - arrival)
        self._prefill.observe_all(by_model, prefilled - routed)
        self._transfer.observe_all(by_model, transfer[transfer > 0])
        self._ttft.observe_all(by_model, first - arrival)
        self._e2e.observe_all(by_model, (finished - arrival)[well])
        several = well & (later > 0)
        self._tpot.observe_all(by_model, (finished - first)[several] / later[several])
        wrong = np.abs(amounts[_PREDICTED] - amounts[_CACHED])
        self._misjudged.observe_all(by_model, wrong[judged] / prompt[judged])
        for family, amount in zip(self._amounts, amounts.sum(axis=1).tolist(), strict=True):
            if amount:
                family.add(by_model, amount)

    def _count(self, model: str, ended: Sequence[tuple[RequestSummary, bool | None]]) -> None:
        for outcome, count in Counter([summary.outcome for summary, _ in ended]).items():
            self._requests.add((model, outcome_label(outcome)), count)
        judged = Counter(
            [(summary.slo.name, "yes" if met else "no") for summary, met in ended if met is not None]
        )
        for (slo, whether), count in judged.items():
            self._slo.add((model, self._slo_of(slo), whether), count)
        for summary, met in ended:
            if met is False and (miss := slo_miss(summary)) is not None:
                self._missed.add((model, self._slo_of(summary.slo.name), miss.promise, miss.cause))
            if summary.reason == CROSS_ROLE:
                self._cross_role.add((model,))

    def _exemplify(self, model: str, summary: RequestSummary, trace: str) -> None:
        if summary.ttft_s is not None:
            self._ttft.labels(model).exemplify(summary.ttft_s, trace)
        if summary.outcome == OK:
            self._e2e.labels(model).exemplify(summary.finished_s - summary.arrival_s, trace)

    def _slo_of(self, name: str) -> str:
        return name if name in self._slos else OTHER

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> HistogramFamily:
        made = HistogramFamily(f"kvasir_{name}", text, ("model",), bounds)
        self._families.append(made)
        self.definitions.append(MetricDefinition.of(f"kvasir_{name}", "histogram", ("model",), text))
        return made

    def _counter(self, name: str, text: str, *labels: str) -> CounterFamily:
        made = CounterFamily(f"kvasir_{name}", text, ("model", *labels))
        self._families.append(made)
        self.definitions.append(MetricDefinition.of(f"kvasir_{name}", "counter", ("model", *labels), text))
        return made


def trace_id_of(context: str, *, missed: bool) -> str:
    """Return the id of the trace in which a request with this trace context is recorded, which missed its SLO
    or not; "" if there is none."""
    return recorded_parent(context, slow_or_failed=missed)[3:35]
