"""PromQL expressions that can only name metrics and labels that exist: they are made from the reference of
all metrics, and a name that is not in it fails where dashboards are generated."""

from __future__ import annotations

from functools import cache

from kvasir.core.errors import ConfigError
from kvasir.telemetry.families.scraped import MetricDefinition
from kvasir.telemetry.reference import definitions

_WINDOW = "$__rate_interval"
_CHOSEN = ("model", "pool", "tenant")
"""Labels whose values a viewer chooses at the top of a dashboard."""


def series(name: str, part: str = "", **where: str) -> str:
    """Return the selector of a metric. `part` is `_bucket`, `_sum` or `_count` of a histogram; `where` gives
    an operator and a quoted value for a label, such as `outcome='!="ok"'`. Raises ConfigError for a metric or
    a label that does not exist."""
    metric = _metric(name, *where)
    if bool(part) != (metric.kind == "histogram"):
        raise ConfigError(f"{name} is a {metric.kind}; it has no series {name}{part}")
    matchers = [
        'job=~"$job"',
        *(f'{label}=~"${label}"' for label in metric.labels if label in _CHOSEN and label not in where),
        *(f"{label}{matcher}" for label, matcher in where.items()),
    ]
    return f"{name}{part}{{{','.join(matchers)}}}"


def rate(name: str, *by: str, part: str = "", **where: str) -> str:
    """Return the growth a second of a counter, or of a part of a histogram, summed by labels."""
    if _metric(name, *by).kind == "gauge":
        raise ConfigError(f"{name} is a gauge; only counters and histograms have a rate")
    return _summed("sum", f"rate({series(name, part, **where)}[{_WINDOW}])", by)


def gauge(name: str, *by: str, how: str = "sum", **where: str) -> str:
    """Return a gauge, aggregated by labels with `how`: sum, max, min or avg."""
    if _metric(name, *by).kind != "gauge":
        raise ConfigError(f"{name} is no gauge")
    return _summed(how, series(name, **where), by)


def quantile(share: float, name: str, *by: str, **where: str) -> str:
    """Return a quantile of a histogram, by labels."""
    return f"histogram_quantile({share:g}, {buckets(name, *by, **where)})"


def buckets(name: str, *by: str, **where: str) -> str:
    """Return the rate of each bucket of a histogram, by labels."""
    return _summed("sum", f"rate({series(name, '_bucket', **where)}[{_WINDOW}])", ("le", *_known(name, by)))


def mean(name: str, *by: str, **where: str) -> str:
    """Return the mean of a histogram's observations, by labels."""
    return f"{rate(name, *by, part='_sum', **where)} / {rate(name, *by, part='_count', **where)}"


def _known(name: str, labels: tuple[str, ...]) -> tuple[str, ...]:
    _metric(name, *labels)
    return labels


def _summed(how: str, expression: str, by: tuple[str, ...]) -> str:
    return f"{how} by ({', '.join(by)}) ({expression})" if by else f"{how}({expression})"


def _metric(name: str, *labels: str) -> MetricDefinition:
    metric = _reference().get(name)
    if metric is None:
        raise ConfigError(f"there is no metric {name}; docs/METRICS.md lists all of them")
    missing = sorted(set(labels) - set(metric.labels))
    if missing:
        raise ConfigError(f"{name} has no label {missing[0]}; it has: {', '.join(metric.labels)}")
    return metric


@cache
def _reference() -> dict[str, MetricDefinition]:
    return {metric.name: metric for metric in definitions()}
