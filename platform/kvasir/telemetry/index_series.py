"""The size of the prefix index, read at scrape time: what it holds, and what that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class IndexStats(Protocol):
    """What is needed of kvasir.native.TreeStats, with its meaning."""

    @property
    def blocks(self) -> int: ...
    @property
    def predicted_blocks(self) -> int: ...
    @property
    def names(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def expired(self) -> int: ...
    @property
    def evicted(self) -> int: ...


_GAUGES: tuple[tuple[str, str, Callable[[IndexStats], int]], ...] = (
    ("blocks", "Blocks in the index, once for each holder", lambda sizes: sizes.blocks),
    ("predicted_blocks", "Those of them that are only predicted", lambda sizes: sizes.predicted_blocks),
    ("names", "Distinct blocks in the index", lambda sizes: sizes.names),
    ("bytes", "Memory of the index", lambda sizes: sizes.bytes),
)
_COUNTERS: tuple[tuple[str, str, Callable[[IndexStats], int]], ...] = (
    ("expired_blocks", "Predictions that no worker confirmed in time", lambda sizes: sizes.expired),
    ("evicted_blocks", "Predictions dropped for want of room", lambda sizes: sizes.evicted),
)


class IndexSeries(Collector):
    """Yields nothing until it is told where to read."""

    def __init__(self) -> None:
        self.read: Callable[[], IndexStats] | None = None

    def collect(self) -> Iterable[Metric]:
        """One family per size."""
        if self.read is None:
            return
        sizes = self.read()
        for name, text, value in _GAUGES:
            yield GaugeMetricFamily(f"kvasir_index_{name}", text, value=value(sizes))
        for name, text, value in _COUNTERS:
            yield CounterMetricFamily(f"kvasir_index_{name}", text, value=value(sizes))
