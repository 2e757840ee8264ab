"""Metric families that are updated as requests run: histograms and counters without locks.

Those of prometheus_client take a lock, and its histogram walks its buckets in Python, which takes several
microseconds. ITL is observed once per delta of every stream, where that is a third of the time budget, and a
request that ends adds to half a dozen counters. These are updated and scraped on one event loop.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar


class Histogram:
    """One series: `counts` per bucket ('Q'), and the sum in `total[0]` ('d'). They are arrays so that native
    code can update them. Not thread-safe."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = array("d", bounds)
        self.counts = array("Q", bytes(8 * (len(bounds) + 1)))
        self.total = array("d", (0.0,))
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, times: int = 1) -> None:
        """Add `times` observations of `value`."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total[0] += value * times

    def observe_all(self, values: NDArray[np.float64]) -> None:
        """Add observations, none of which is NaN."""
        counts = np.frombuffer(self.counts, np.uint64)
        counts += np.bincount(np.searchsorted(self.bounds, values), minlength=len(counts)).astype(np.uint64)
        self.total[0] += float(values.sum())

    def exemplify(self, value: float, trace_id: str) -> None:
        """Show this trace beside the bucket of an observed value, until another is shown there."""
        self.exemplars[bisect_left(self.bounds, value)] = Exemplar({"trace_id": trace_id}, value)


class HistogramFamily(Collector):
    """All series of one metric. `bounds` are the upper bounds in ascending order, without infinity."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], Histogram] = {}

    def labels(self, *values: str) -> Histogram:
        """Return the series of these label values, created on first use. Callers bound the values."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = Histogram(self._bounds)
        return series

    def observe_all(self, values: tuple[str, ...], observed: NDArray[np.float64]) -> None:
        """Add observations to the series of these label values, but for those that are NaN."""
        known = observed[~np.isnan(observed)]
        if len(known):
            self.labels(*values).observe_all(known)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Yield one family with cumulative buckets."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in self._series.items():
            running = 0
            buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
            bounds = (*map(str, self._bounds), "+Inf")
            for i, (bound, count) in enumerate(zip(bounds, series.counts, strict=True)):
                running += count
                example = series.exemplars.get(i)
                so_far = bound, float(running)
                buckets.append(so_far if example is None else (*so_far, example))
            family.add_metric(values, buckets, series.total[0])
        yield family


class CounterFamily(Collector):
    """All series of one metric that only grows."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._counts: dict[tuple[str, ...], float] = {}

    def add(self, values: tuple[str, ...], amount: float = 1.0) -> None:
        """Add to the series of these label values, created on first use. Callers bound the values. Raise
        ValueError unless there is one for each label."""
        count = self._counts.get(values)
        if count is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}, not {len(values)} of them")
            count = 0.0
        self._counts[values] = count + amount

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Yield one family."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(values, count)
        yield family
