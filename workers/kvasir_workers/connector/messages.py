"""The values that the connector passes to vLLM, as vLLM's own classes: orders, reports, endpoints, events and
statistics. vLLM carries them between the halves, and out of the engine."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvasir.core.identity import KvLayout
from kvasir_workers.connector import stats
from kvasir_workers.connector.orders import StepOrders, StepReport


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders, from the scheduler to the workers."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class RankReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """One step's report, from the workers to the scheduler."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        """Merge another rank's report into this one."""
        if isinstance(other, RankReport):
            self.report.merge(other.report)
        return self


class RankEndpoint(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """One rank's agent endpoint, "" for none, and its KV layout, sent to the scheduler."""

    def __init__(self, endpoint: str, layout: KvLayout) -> None:
        self.endpoint = endpoint
        self.layout = layout


class KvasirTierChanged(KVCacheEvent, tag="KvasirTierChanged"):  # type: ignore[misc, call-arg]
    """Changes of the tiers below the device; `log` as in kvasir.core.kv.KvEventKind."""

    log: bytes


class TransferStats(KVConnectorStats):  # type: ignore[misc]
    """Transfer statistics of some steps, with the keys of stats.py."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Clear the statistics."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        """Add counters; keep the newer level."""
        counters = (*stats.COUNTERS, *stats.TIER_COUNTERS)
        sums = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in counters}
        early = {**self.data.get(stats.EARLY_HANDOFFS, {}), **other.data.get(stats.EARLY_HANDOFFS, {})}
        self.data = {**self.data, **other.data, **sums, **({stats.EARLY_HANDOFFS: early} if early else {})}
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values for vLLM's log line."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Return whether there is nothing to report."""
        return not self.data
