"""What the connector hands to vLLM, in the classes that vLLM asks for: orders, reports, endpoints, events and
figures. vLLM carries them between the halves, and out of the engine."""

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
    """One step's orders, on their way to the workers."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class RankReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """One step's report, on its way to the scheduler."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        """Both ranks' reports as one."""
        if isinstance(other, RankReport):
            self.report.merge(other.report)
        return self


class RankEndpoint(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where one rank's agent is reached, "" for none, and how its KV lies in memory, on their way to the
    scheduler."""

    def __init__(self, endpoint: str, layout: KvLayout) -> None:
        self.endpoint = endpoint
        self.layout = layout


class KvasirTierChanged(KVCacheEvent, tag="KvasirTierChanged"):  # type: ignore[misc, call-arg]
    """What tiers below the device hold has changed; `log` as in kvasir.core.kv.KvEventKind."""

    log: bytes


class TransferStats(KVConnectorStats):  # type: ignore[misc]
    """Transfer figures of some steps, keyed as in stats.py."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget all."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        """Counters add up; the newer level stays."""
        counters = (*stats.COUNTERS, *stats.TIER_COUNTERS)
        sums = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in counters}
        early = {**self.data.get(stats.EARLY_HANDOFFS, {}), **other.data.get(stats.EARLY_HANDOFFS, {})}
        self.data = {**self.data, **other.data, **sums, **({stats.EARLY_HANDOFFS: early} if early else {})}
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data
