"""The series of each worker's tiers below the device: what they hold and gave, and whether they work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kvasir.core.kv import TierLoad
from kvasir.ports.router import WorkerView

_GAUGES: tuple[tuple[str, str, Callable[[TierLoad], float]], ...] = (
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
_COUNTERS: tuple[tuple[str, str, Callable[[TierLoad], float]], ...] = (
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


def tier_families(views: Sequence[WorkerView]) -> Iterable[Metric]:
    """One family per figure, one series for each tier of each worker that has reported it."""
    labels = ("worker", "pool", "tier")
    tiers = [
        ((view.worker_id, view.pool, tier.medium.name.lower()), tier)
        for view in views
        if view.load is not None
        for tier in view.load.tiers
    ]
    for name, text, read in _GAUGES:
        gauge = GaugeMetricFamily(f"kvasir_worker_tier_{name}", text, labels=labels)
        for label, tier in tiers:
            gauge.add_metric(label, read(tier))
        yield gauge
    for name, text, read in _COUNTERS:
        counter = CounterMetricFamily(f"kvasir_worker_tier_{name}", text, labels=labels)
        for label, tier in tiers:
            counter.add_metric(label, read(tier))
        yield counter
