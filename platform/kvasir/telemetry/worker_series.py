"""The series of each worker and of its tiers below the device, made at scrape time from the last view of it.

Nothing is kept per series, so a worker that is gone leaves nothing behind, and a view costs one
dictionary store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvasir.core.kv import KvState, TierLoad
from kvasir.core.requests import EngineLoad
from kvasir.ports.router import HEALTH_STATES, WorkerView

T = TypeVar("T")
_Figures = tuple[tuple[str, str, Callable[[T], float]], ...]
"""Figures of something by name, with what they are and how to read them."""

_GAUGES: _Figures[EngineLoad] = (
    ("running", "Requests in the engine's batch", lambda load: load.running),
    ("waiting", "Requests that wait in the engine", lambda load: load.waiting),
    ("kv_usage_ratio", "Fraction of KV blocks held by running requests", lambda load: load.kv_usage),
    ("kv_blocks_capacity", "KV blocks in all", lambda load: load.kv_blocks_total),
    ("kv_blocks_leased", "KV blocks pinned for other workers to pull", lambda load: load.kv_blocks_leased),
)
_COUNTERS: _Figures[EngineLoad] = (
    ("prefix_queries_tokens", "Prompt tokens looked up", lambda load: load.prefix_queries_tokens),
    ("prefix_hits_tokens", "Prompt tokens found in the KV cache", lambda load: load.prefix_hits_tokens),
    ("transfer_received_bytes", "KV bytes pulled", lambda load: load.transfer_bytes_received),
    ("transfers_received", "KV pulls that arrived", lambda load: load.transfers_received),
    ("transfers_failed", "KV pulls that failed", lambda load: load.transfers_failed),
    ("preemptions", "Requests thrown out of the batch to start again", lambda load: load.preemptions),
    ("swapped_in", "Preempted requests that went on from a tier's KV", lambda load: load.swapped_in),
    ("recomputed", "Preempted requests that were computed again", lambda load: load.recomputed),
    ("speculated_tokens", "Tokens proposed by speculation", lambda load: load.speculated_tokens),
    ("accepted_tokens", "Proposed tokens that were right", lambda load: load.accepted_tokens),
)
_TIER_GAUGES: _Figures[TierLoad] = (
    ("blocks", "Blocks in the tier, as far as the worker knows", lambda tier: tier.blocks),
    ("bytes", "Bytes that they take", lambda tier: tier.bytes_used),
    (
        "capacity_bytes",
        "Bytes that they may take; 0 where that is not the worker's",
        lambda t: t.bytes_capacity,
    ),
    ("up", "1 while the tier is read, 0 while it cannot be", lambda tier: tier.readable),
    ("trouble", "1 while something is wrong with the tier, read or not", lambda tier: bool(tier.trouble)),
)
_TIER_COUNTERS: _Figures[TierLoad] = (
    ("loads", "Reads of several blocks at once", lambda tier: tier.loads),
    ("loaded_blocks", "Blocks read", lambda tier: tier.loaded_blocks),
    ("loaded_bytes", "Bytes read", lambda tier: tier.loaded_bytes),
    ("load_seconds", "Time that reads took", lambda tier: tier.load_s),
    ("stored_blocks", "Blocks written", lambda tier: tier.stored_blocks),
    ("stored_bytes", "Bytes written", lambda tier: tier.stored_bytes),
    ("evicted_blocks", "Blocks that gave way to others", lambda tier: tier.evicted_blocks),
    (
        "corrupt_blocks",
        "Blocks that were not what had been written, and not used",
        lambda t: t.corrupt_blocks,
    ),
    ("dropped_blocks", "Blocks not written, since too many waited to be", lambda tier: tier.dropped_blocks),
    ("failures", "Calls that failed or passed their deadline", lambda tier: tier.failures),
)

NOT_JUDGED = ("connecting", "refused")
"""States in which a worker is given nothing, so that nothing is known of its health."""


class WorkerSeries(Collector):
    """Per-worker gauges and counters, and workers by state."""

    def __init__(self) -> None:
        self._views: dict[str, WorkerView] = {}

    def seen(self, view: WorkerView) -> None:
        """Remember the newest view of a worker."""
        self._views[view.worker_id] = view

    def gone(self, worker_id: str) -> None:
        """Drop a worker's series; unknown ids are ignored."""
        self._views.pop(worker_id, None)

    def known(self) -> set[str]:
        """The ids of the workers that have series."""
        return set(self._views)

    def collect(self) -> Iterable[Metric]:
        """One family per metric, one series per worker, or tier of a worker, that has been reported."""
        labels = ("worker", "pool")
        views = list(self._views.values())
        loads = [((view.worker_id, view.pool), view.load) for view in views if view.load is not None]
        tiers = [((*worker, tier.medium.name.lower()), tier) for worker, load in loads for tier in load.tiers]
        yield from _families(GaugeMetricFamily, "kvasir_worker_", labels, _GAUGES, loads)
        yield from _families(CounterMetricFamily, "kvasir_worker_", labels, _COUNTERS, loads)
        of_tier = (*labels, "tier")
        yield from _families(GaugeMetricFamily, "kvasir_worker_tier_", of_tier, _TIER_GAUGES, tiers)
        yield from _families(CounterMetricFamily, "kvasir_worker_tier_", of_tier, _TIER_COUNTERS, tiers)
        in_flight = GaugeMetricFamily(
            "kvasir_worker_in_flight", "Requests that the router has on the worker", labels=labels
        )
        for view in views:
            in_flight.add_metric((view.worker_id, view.pool), view.in_flight)
        yield in_flight
        yield from _caches(views)
        yield from _health([view for view in views if view.state not in NOT_JUDGED])
        states = Counter((view.pool, view.state) for view in views)
        by_state = GaugeMetricFamily("kvasir_workers", "Workers by state", labels=("pool", "state"))
        for (pool, state), count in states.items():
            by_state.add_metric((pool, state), count)
        yield by_state


def _families(
    make: type[GaugeMetricFamily] | type[CounterMetricFamily],
    prefix: str,
    labels: Sequence[str],
    figures: _Figures[T],
    rows: Sequence[tuple[Sequence[str], T]],
) -> Iterable[Metric]:
    """One family per figure, one series per labelled row."""
    for name, text, read in figures:
        family = make(prefix + name, text, labels=labels)
        for values, each in rows:
            family.add_metric(values, read(each))
        yield family


def _health(views: Sequence[WorkerView]) -> Iterable[Metric]:
    """How each worker answers, and which pools are used in spite of it."""
    labels = ("worker", "pool")
    state = GaugeMetricFamily(
        "kvasir_worker_health", "1 for the state that the worker's health is in", labels=(*labels, "state")
    )
    share = GaugeMetricFamily(
        "kvasir_worker_share", "Part of its peers' load that the worker may have", labels=labels
    )
    ejections = CounterMetricFamily(
        "kvasir_worker_ejections", "How often the worker was left alone for answering badly", labels=labels
    )
    panic = GaugeMetricFamily(
        "kvasir_pool_panic",
        "1 while so much of the pool looks bad that all of it is used",
        labels=("pool",),
    )
    for view in views:
        worker = (view.worker_id, view.pool)
        for each in HEALTH_STATES:
            state.add_metric((*worker, each), each == view.health.state)
        share.add_metric(worker, view.health.share)
        ejections.add_metric(worker, view.health.ejections)
    for pool in sorted({view.pool for view in views}):
        panic.add_metric((pool,), any(view.health.panic for view in views if view.pool == pool))
    yield from (state, share, ejections, panic)


def _caches(views: Sequence[WorkerView]) -> Iterable[Metric]:
    """What the router knows of each worker's cache, and how well."""
    labels = ("worker", "pool")
    state = GaugeMetricFamily(
        "kvasir_worker_kv_state",
        "1 for the state that the router's picture of the worker's cache is in",
        labels=(*labels, "state"),
    )
    blocks = GaugeMetricFamily(
        "kvasir_worker_kv_blocks", "Blocks that the router knows the worker to hold", labels=(*labels, "kind")
    )
    resyncs = CounterMetricFamily(
        "kvasir_worker_kv_resyncs", "Snapshots that the picture was made anew from", labels=labels
    )
    error = GaugeMetricFamily(
        "kvasir_worker_kv_error_ratio",
        "Mean error of predicted cached tokens lately, as a fraction of the prompt",
        labels=labels,
    )
    judged = CounterMetricFamily(
        "kvasir_worker_kv_evaluated_requests", "Requests whose predicted hit was compared", labels=labels
    )
    wrong = CounterMetricFamily(
        "kvasir_worker_kv_error_tokens", "Tokens by which cached tokens were misjudged", labels=labels
    )
    for view in views:
        if view.kv is None:
            continue
        worker = (view.worker_id, view.pool)
        for each in KvState:
            state.add_metric((*worker, each), each is view.kv.state)
        blocks.add_metric((*worker, "reported"), view.kv.blocks)
        blocks.add_metric((*worker, "predicted"), view.kv.predicted_blocks)
        resyncs.add_metric(worker, view.kv.resyncs)
        error.add_metric(worker, view.kv.error_ratio)
        judged.add_metric(worker, view.kv.evaluated_requests)
        wrong.add_metric(worker, view.kv.error_tokens)
    yield from (state, blocks, resyncs, error, judged, wrong)
