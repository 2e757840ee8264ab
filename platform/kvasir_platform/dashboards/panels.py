"""Panels and dashboards, and how Grafana writes them down: the JSON model of a dashboard, version 39 of its
schema (https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 39
_COLUMNS = 24
_HEIGHT = 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_TRACES = {"type": "tempo", "uid": "${traces}"}

PanelKind = Literal["timeseries", "stat", "heatmap", "traces", "text"]


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """An expression, and the legend of its series. `exemplars`: traces are shown on it, where Prometheus has
    them."""

    expression: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `unit` is Grafana's name of a unit; `text` is what a panel of that kind shows."""

    title: str
    unit: str
    queries: tuple[PanelQuery, ...]
    description: str = ""
    kind: PanelKind = "timeseries"
    width: int = 12
    stacked: bool = False
    text: str = ""


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard. `chosen` are labels whose values the viewer chooses, each with a metric that has it;
    `traces`: it shows traces too."""

    uid: str
    title: str
    description: str
    rows: tuple[PanelRow, ...]
    chosen: tuple[tuple[str, str], ...] = (("model", "kvasir_requests_total"),)
    traces: bool = False


def chart(
    title: str,
    unit: str,
    *queries: tuple[str, str],
    description: str = "",
    kind: PanelKind = "timeseries",
    width: int = 12,
    stacked: bool = False,
    exemplars: bool = False,
) -> Panel:
    """Return a panel of expressions, each with its legend."""
    made = tuple(PanelQuery(expression, legend, exemplars) for expression, legend in queries)
    return Panel(title, unit, made, description, kind, width, stacked)


def grafana(board: Dashboard) -> dict[str, Any]:
    """Return the JSON model of a dashboard."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": ["kvasir"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [
            {
                "title": "Kvasir",
                "type": "dashboards",
                "tags": ["kvasir"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
                "icon": "external link",
                "tooltip": "",
                "url": "",
            }
        ],
        "templating": {"list": list(_variables(board))},
        "panels": list(_placed(board.rows)),
    }


def _variables(board: Dashboard) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    if board.traces:
        yield {"name": "traces", "label": "Traces", "type": "datasource", "query": "tempo"}
        yield {"name": "trace", "label": "Trace id", "type": "textbox", "query": ""}
    for label, metric in (("job", "kvasir_requests_in_flight"), *board.chosen):
        yield {
            "name": label,
            "label": label.capitalize(),
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": f"label_values({metric}, {label})", "refId": label},
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "sort": 1,
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }


def _placed(rows: Sequence[PanelRow]) -> Iterator[dict[str, Any]]:
    """Yield rows and panels with their numbers and places: from left to right, from top to bottom."""
    number, top = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": top},
            "panels": [],
        }
        top, left = top + 1, 0
        for panel in row.panels:
            if left + panel.width > _COLUMNS:
                top, left = top + _HEIGHT, 0
            number += 1
            place = {"h": _HEIGHT, "w": panel.width, "x": left, "y": top}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            left += panel.width
        top += _HEIGHT


def _panel(panel: Panel) -> dict[str, Any]:
    shown: dict[str, Any] = {"type": panel.kind, "title": panel.title, "description": panel.description}
    if panel.kind == "text":
        return shown | {"options": {"mode": "markdown", "content": panel.text}}
    if panel.kind == "traces":
        target = {"refId": "A", "datasource": _TRACES, "queryType": "traceql", "query": "${trace}"}
        return shown | {"datasource": _TRACES, "targets": [target]}
    return shown | {
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": _options(panel),
        "targets": [_target(chr(ord("A") + i), panel, query) for i, query in enumerate(panel.queries)],
    }


def _target(name: str, panel: Panel, query: PanelQuery) -> dict[str, Any]:
    return {
        "refId": name,
        "datasource": _SOURCE,
        "expr": query.expression,
        "legendFormat": "{{le}}" if panel.kind == "heatmap" else query.legend or "__auto",
        "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        "exemplar": query.exemplars,
        "range": True,
    }


def _field(panel: Panel) -> dict[str, Any]:
    if panel.kind == "heatmap":
        return {}
    field: dict[str, Any] = {"unit": panel.unit}
    if panel.unit == "percentunit":
        field |= {"min": 0, "max": 1}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        field["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 40 if panel.stacked else 8,
            "lineWidth": 1,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": stacking,
        }
    return field


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {
            "colorMode": "value",
            "graphMode": "area",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    if panel.kind == "heatmap":
        return {
            "calculate": False,
            "yAxis": {"unit": panel.unit},
            "color": {"mode": "scheme", "scheme": "Spectral", "steps": 64},
            "exemplars": {"color": "rgba(255,0,255,0.7)"},
            "tooltip": {"mode": "single", "yHistogram": True},
        }
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
