"""The page of metrics is that of the code, and alerts name metrics and labels that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.architecture.test_pages import anchors, every_series

from kvasir.telemetry.reference import definitions, page

ROOT = Path(__file__).resolve().parents[2]
ALERTS: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "helm" / "kvasir" / "files" / "alerts.yaml").read_text()
)
LABELS = {metric.name: set(metric.labels) for metric in definitions()}
SELECTED = re.compile(r"(kvasir_\w+)\{ONLY(?:,([^}]*))?\}")


def named(alert: dict[str, Any]) -> str:
    return str(alert["alert"])


def family_of(series: str) -> str:
    """The metric of a series, which may be a part of a histogram."""
    return series if series in LABELS else re.sub(r"_(bucket|sum|count)$", "", series)


def grouped(expression: str) -> list[set[str]]:
    return [set(re.split(r"\s*,\s*", labels)) for labels in re.findall(r"by \(([^)]*)\)", expression)]


def test_the_page_is_that_of_the_code() -> None:
    assert (ROOT / "docs" / "METRICS.md").read_text("utf-8") == page(), "run `make pages`"


def test_the_definitions_are_those_of_all_that_can_be_scraped() -> None:
    assert set(LABELS) == every_series()


def test_each_metric_says_what_it_means_and_is_named_once() -> None:
    assert len({metric.name for metric in definitions()}) == len(definitions())
    for metric in definitions():
        assert metric.text[:1].isupper() or metric.text[:1].isdigit(), metric
        assert not metric.text.endswith("."), metric


@pytest.mark.parametrize("alert", ALERTS, ids=named)
def test_an_alert_names_metrics_and_labels_that_exist(alert: dict[str, Any]) -> None:
    expression = alert["expr"]
    selected = SELECTED.findall(expression)
    assert len(selected) == len(re.findall(r"\bkvasir_\w+", expression)), (
        "a metric without the release's labels"
    )
    for series, matchers in selected:
        labels = LABELS[family_of(series)] | ({"le"} if series.endswith("_bucket") else set())
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers):
            assert label in labels, f"{series} has no label {label}"
        for by in grouped(expression):
            assert by <= labels, f"{series} is grouped by {by - labels}"


@pytest.mark.parametrize("alert", ALERTS, ids=named)
def test_an_alert_has_the_labels_that_its_summary_names_and_a_section_to_read(alert: dict[str, Any]) -> None:
    used = set(re.findall(r"\$labels\.(\w+)", alert["summary"]))
    assert all(used <= by for by in grouped(alert["expr"])), used
    assert not used or grouped(alert["expr"])
    assert alert["section"] in anchors(ROOT / "docs" / "RUNBOOK.md")
