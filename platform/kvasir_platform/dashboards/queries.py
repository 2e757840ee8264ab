"""Queries of panels: expressions, each with the legend that its labels give it.

Labels are one text, such as "pool state", and a metric may come with words. A legend is the labels' values,
and then the words.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir_platform.dashboards.expressions import gauge, rate

PanelLine = tuple[str, str]
"""An expression and its legend."""
NamedMetric = str | tuple[str, str]
"""A metric, or one with words for its legend."""


def rates(by: str, *metrics: NamedMetric) -> list[PanelLine]:
    """Return the growth a second of each counter."""
    return [_line(lambda name: rate(name, *by.split()), by, each) for each in metrics]


def gauges(by: str, *metrics: NamedMetric, how: str = "sum") -> list[PanelLine]:
    """Return each gauge, aggregated with `how`."""
    return [_line(lambda name: gauge(name, *by.split(), how=how), by, each) for each in metrics]


def positive(by: str, metric: str, **where: str) -> PanelLine:
    """Return the series of a gauge that are above 0."""
    return f"{gauge(metric, *by.split(), how='max', **where)} > 0", legend(by)


def ratio(make: Callable[[str, str], str], above: str, below: str, by: str, words: str = "") -> PanelLine:
    """Return one metric as a multiple of another, both made by `make`: rate or gauge."""
    return f"{make(above, by)} / {make(below, by)}", legend(by, words)


def legend(by: str, words: str = "") -> str:
    """Return the labels' values, and the words."""
    return " ".join([*(f"{{{{{label}}}}}" for label in by.split()), *words.split()])


def _line(make: Callable[[str], str], by: str, metric: NamedMetric) -> PanelLine:
    name, words = (metric, "") if isinstance(metric, str) else metric
    return make(name), legend(by, words)
