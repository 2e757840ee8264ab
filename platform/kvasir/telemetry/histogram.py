"""A histogram that costs a bisection and two additions per observation.

prometheus_client's own takes a lock and walks its buckets in Python, several microseconds; inter-token
latency is observed once per delta of every stream, where that would be a third of the whole budget. This
one is fed and scraped on one event loop, so it needs no lock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Histogram:
    """One series: `counts` per bucket ('Q'), and the sum as `total[0]` ('d'), arrays so that native code may
    count as well. Not thread-safe."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = array("d", bounds)
        self.counts = array("Q", bytes(8 * (len(bounds) + 1)))
        self.total = array("d", (0.0,))

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` in its bucket `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total[0] += value * times


class HistogramFamily(Collector):
    """All series of one metric. `bounds` are upper bounds in ascending order, without infinity."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], Histogram] = {}

    def labels(self, *values: str) -> Histogram:
        """The series of these label values, made on first use. Callers bound the values."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Histogram(self._bounds)
        return series

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """One family with cumulative buckets, as Prometheus wants them."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in self._series.items():
            running = 0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip((*map(str, self._bounds), "+Inf"), series.counts, strict=True):
                running += count
                buckets.append((bound, float(running)))
            family.add_metric(values, buckets, series.total[0])
        yield family
