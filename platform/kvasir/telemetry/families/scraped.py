"""Metric families of values that are read at scrape time, declared in tables and exposed by one collector.

No sample is kept between scrapes, so a worker, pool or tenant that is gone leaves no series behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

S = TypeVar("S")
Rows = Collection[tuple[tuple[str, ...], Any]]
"""Label values and the record that they stand for, one entry per row."""


@dataclass(frozen=True, slots=True)
class SeriesFamily:
    """One family. `read` is the attribute of a row's record that holds the value, or a function that returns
    it; where `by` names one more label, the function returns a value for each value of that label."""

    make: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    text: str
    read: str | Callable[[Any], float | Mapping[str, float]]
    by: str | None = None


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """A metric as it is scraped. `kind` is counter, gauge or histogram; a counter's name ends with
    `_total`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @classmethod
    def of(cls, name: str, kind: str, labels: tuple[str, ...], text: str) -> MetricDefinition:
        """Return the definition of a family of this name, without the suffix of a counter."""
        return cls(f"{name}_total" if kind == "counter" else name, kind, labels, text)


gauge = partial(SeriesFamily, GaugeMetricFamily)
counter = partial(SeriesFamily, CounterMetricFamily)


class SeriesTable(Generic[S]):
    """Families with the same name prefix, labels and rows. `rows` takes the rows from what was read; None
    hides the families."""

    def __init__(
        self,
        prefix: str,
        labels: tuple[str, ...],
        rows: Callable[[S], Rows | None],
        *families: SeriesFamily,
    ) -> None:
        self._prefix = prefix
        self._labels = labels
        self._rows = rows
        self._families = families

    def definitions(self) -> Iterable[MetricDefinition]:
        """The definition of each family."""
        for family in self._families:
            kind = "counter" if family.make is CounterMetricFamily else "gauge"
            yield MetricDefinition.of(self._prefix + family.name, kind, self._labels_of(family), family.text)

    def _labels_of(self, family: SeriesFamily) -> tuple[str, ...]:
        return self._labels if family.by is None else (*self._labels, family.by)

    def collect(self, source: S) -> Iterable[Metric]:
        """One metric per family, one sample per row and value of `by`."""
        rows = self._rows(source)
        if rows is None:
            return
        for family in self._families:
            metric = family.make(self._prefix + family.name, family.text, labels=self._labels_of(family))
            read = attrgetter(family.read) if isinstance(family.read, str) else family.read
            for values, record in rows:
                value: Any = read(record)
                if family.by is None:
                    metric.add_metric(values, value)
                else:
                    for more, part in value.items():
                        metric.add_metric((*values, more), part)
            yield metric


class SeriesCollector(Collector, Generic[S]):
    """Exposes tables of what `read` returns. Collects no samples until `read` is set."""

    def __init__(self, *tables: SeriesTable[S]) -> None:
        self._tables = tables
        self.read: Callable[[], S] | None = None

    def collect(self) -> Iterable[Metric]:
        """The families of all tables, in order."""
        if self.read is not None:
            source = self.read()
            for table in self._tables:
                yield from table.collect(source)


def single(record: object) -> Rows:
    """The only row of a table without labels."""
    return (((), record),)


def by_name(records: Mapping[str, object]) -> Rows:
    """One row per name, for a table whose only label is that name."""
    return tuple(((name,), record) for name, record in records.items())
