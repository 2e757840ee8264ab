"""Finds what an expression in PromQL names that cannot be scraped: metrics, labels of selectors, and labels
that it groups by. Its grammar is promtool's business."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_SELECTOR = re.compile(r"\b(kvasir_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_BY = re.compile(r"\bby \(([^)]*)\)\s*\(")
SCRAPED = frozenset({"job", "instance", "namespace", "pod"})
"""Labels that a scrape adds to each series."""


def metric_of(series: str, labels: Mapping[str, object]) -> str:
    """The metric of a series, which may be a part of a histogram."""
    return series if series in labels else re.sub(r"_(bucket|sum|count)$", "", series)


def metrics_in(expression: str) -> list[str]:
    """The series that an expression names."""
    return [name for name, _ in _SELECTOR.findall(expression)]


def wrong_names(expression: str, labels: Mapping[str, frozenset[str]]) -> list[str]:
    """What is wrong with the names in an expression, where `labels` has the labels of each metric."""
    return [*_selectors(expression, labels), *_groups(expression, labels)]


def _selectors(expression: str, labels: Mapping[str, frozenset[str]]) -> Iterator[str]:
    for series, matchers in _SELECTOR.findall(expression):
        known = _labels_of(series, labels)
        if known is None:
            yield f"there is no series {series}"
        else:
            yield from (
                f"{series} has no label {each}" for each in _MATCHER.findall(matchers) if each not in known
            )


def _groups(expression: str, labels: Mapping[str, frozenset[str]]) -> Iterator[str]:
    for found in _BY.finditer(expression):
        by = {label for label in re.split(r"\s*,\s*", found[1]) if label}
        inner = _enclosed(expression, found.end())
        for series in metrics_in(inner):
            known = _labels_of(series, labels) or by
            yield from (f"{series} is grouped by {each}, which it lacks" for each in sorted(by - known))


def _labels_of(series: str, labels: Mapping[str, frozenset[str]]) -> frozenset[str] | None:
    metric = metric_of(series, labels)
    if metric not in labels:
        return None
    return labels[metric] | SCRAPED | ({"le"} if series.endswith("_bucket") else set())


def _enclosed(expression: str, begin: int) -> str:
    """The text from `begin` to the parenthesis that closes it."""
    depth = 1
    for end in range(begin, len(expression)):
        depth += {"(": 1, ")": -1}.get(expression[end], 0)
        if depth == 0:
            return expression[begin:end]
    return expression[begin:]
