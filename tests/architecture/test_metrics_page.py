"""The page of metrics is that of the code; alerts and dashboards name metrics and labels that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from tests.architecture.test_pages import anchors, every_series
from tests.kit.observability.promql import metrics_in, wrong_names

from kvasir.core.errors import ConfigError
from kvasir.telemetry.reference import definitions, page
from kvasir_platform.dashboards.expressions import gauge, quantile, rate, series
from kvasir_platform.dashboards.files import DASHBOARDS, dashboard_files

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "helm" / "kvasir" / "files"
RUNBOOK = ROOT / "docs" / "RUNBOOK.md"
ALERTS: list[dict[str, Any]] = yaml.safe_load((FILES / "alerts.yaml").read_text())
LABELS = {metric.name: frozenset(metric.labels) for metric in definitions()}


def named(alert: dict[str, Any]) -> str:
    return str(alert["alert"])


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
    assert metrics_in(expression)
    assert len(metrics_in(expression)) == expression.count("{ONLY"), "a metric without the release's labels"
    assert wrong_names(re.sub(r"\{ONLY,?", "{", expression), LABELS) == []


@pytest.mark.parametrize("alert", ALERTS, ids=named)
def test_an_alert_has_the_labels_that_its_summary_names_and_a_section_to_read(alert: dict[str, Any]) -> None:
    used = set(re.findall(r"\$labels\.(\w+)", alert["summary"]))
    first = re.match(
        r"[a-z_]+ by \(([^)]*)\)|(?:histogram_quantile\([^,]*, )?sum by \(([^)]*)\)", alert["expr"]
    )
    kept = set() if first is None else set(re.split(r"\s*,\s*", first[1] or first[2]))
    assert used <= kept, used
    assert alert["section"] in anchors(RUNBOOK)


def test_the_runbook_lists_each_alert_with_the_section_that_it_links_to() -> None:
    rows = re.findall(
        r"^\| (`Kvasir[^|]*) \| \[[^]]*\]\(#([\w-]+)\) \|$", RUNBOOK.read_text("utf-8"), re.MULTILINE
    )
    listed = {name: section for names, section in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == {alert["alert"]: alert["section"] for alert in ALERTS}


def test_a_name_that_does_not_exist_is_found() -> None:
    queued = "kvasir_admission_queued"
    assert wrong_names(f"sum by (model) ({queued})", LABELS) == []
    assert wrong_names(f"sum by (pool) ({queued})", LABELS) == [
        f"{queued} is grouped by pool, which it lacks"
    ]
    assert wrong_names(f'{queued}{{pool="p"}} > 0', LABELS) == [f"{queued} has no label pool"]
    assert wrong_names("rate(kvasir_lost_total[5m])", LABELS) == ["there is no series kvasir_lost_total"]


# -- dashboards -----------------------------------------------------------------------------------


EXPRESSIONS = [
    pytest.param(query.expression, id=f"{board.uid}: {panel.title}")
    for board in DASHBOARDS
    for row in board.rows
    for panel in row.panels
    for query in panel.queries
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_dashboard_names_metrics_and_labels_that_exist(expression: str) -> None:
    assert metrics_in(expression)
    assert wrong_names(expression, LABELS) == []
    assert expression.count('job=~"$job"') == len(metrics_in(expression))


def test_an_expression_of_what_does_not_exist_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match="no metric kvasir_lost"):
        rate("kvasir_lost_total")
    with pytest.raises(ConfigError, match="has no label pool"):
        gauge("kvasir_admission_queued", "pool")
    with pytest.raises(ConfigError, match="is a gauge"):
        rate("kvasir_admission_queued")
    with pytest.raises(ConfigError, match="is no gauge"):
        gauge("kvasir_requests_total")
    with pytest.raises(ConfigError, match="has no label worker"):
        quantile(0.5, "kvasir_prefill_seconds", "worker")
    with pytest.raises(ConfigError, match="is a counter"):
        series("kvasir_requests_total", "_bucket")


def test_the_files_are_those_of_the_code() -> None:
    written = {path.name: path.read_text("utf-8") for path in (FILES / "dashboards").glob("*.json")}
    assert written == dashboard_files(), "run `make pages`"


@pytest.mark.parametrize("name", sorted(dashboard_files()))
def test_a_dashboard_fits_grafanas_schema(name: str) -> None:
    schema = Draft7Validator(
        json.loads((ROOT / "tests" / "helm" / "crds" / "grafana_dashboard.json").read_text())
    )
    board = json.loads(dashboard_files()[name])
    assert [error.message for error in schema.iter_errors(board)] == []
    board["panels"][1]["gridPosition"] = board["panels"][1].pop("gridPos")
    assert not schema.is_valid(board)


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_panels_do_not_overlap_and_variables_are_declared(board: Any) -> None:
    made = json.loads(dashboard_files()[f"{board.uid}.json"])
    taken: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(made["panels"]))) - {"__rate_interval"}
    assert used == {variable["name"] for variable in made["templating"]["list"]}
