"""Asks Prometheus' own promtool which alerts fire, in its time, on given series or on those of a fleet.

A fleet is scraped three times: at the beginning, before a fault, and some time after it. The test of promtool
continues what happened between the first two for `BEFORE_MIN` minutes, and what happened between the last two
for `AFTER_MIN` more, so that alerts have the windows and the patience of the chart's."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.kit.programs import program

from kvasir_platform.edge.exposition import Families

ALERTS_FILE = Path(__file__).resolve().parents[3] / "helm" / "kvasir" / "files" / "alerts.yaml"
BEFORE_MIN = 30
AFTER_MIN = 35
_MOVED = 0.05
_GOT = re.compile(
    r"time: (?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?,\s*exp:.*?got:\[?(.*?)(?:\n\s*\n|\n\s*expr:|\Z)", re.DOTALL
)
_NAME = re.compile(r'alertname=\\?"(\w+)\\?"')


@dataclass(frozen=True, slots=True)
class Watched:
    """Three scrapes of a fleet: `calm_s` seconds from `first` to `before`, and `fault_s` to `after`.
    `wall_s` is Unix time in seconds, of all three."""

    first: Families
    before: Families
    after: Families
    calm_s: float
    fault_s: float
    wall_s: float


def rules(alerts: Sequence[Mapping[str, Any]], scale: float = 1.0) -> dict[str, Any]:
    """The alerts as a file of rules for one release, with windows and waits `scale` times as long."""
    found = []
    for alert in alerts:
        expression = alert["expr"].replace("{ONLY,", "{").replace("{ONLY}", "")
        rule = {
            "alert": alert["alert"],
            "expr": _scaled(expression, scale),
            "for": _duration(alert["for"], scale),
        }
        found.append(rule | {"labels": {"severity": alert["severity"]}})
    return {"groups": [{"name": "kvasir", "rules": found}]}


def chart_alerts() -> list[dict[str, Any]]:
    """The alerts of the chart."""
    found: list[dict[str, Any]] = yaml.safe_load(ALERTS_FILE.read_text(encoding="utf-8"))
    return found


def wrong_firing(
    series: Mapping[str, str], minute: int, expected: Mapping[str, Sequence[Mapping[str, str]]], folder: Path
) -> str:
    """Return "" if each alert that `expected` names fires in this minute with these sets of labels and with
    no others, and else promtool's words. `series` gives the values of each series, one a minute, as promtool
    writes them."""
    alerts = [alert for alert in chart_alerts() if alert["alert"] in expected]
    severities = {alert["alert"]: alert["severity"] for alert in alerts}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {
                "eval_time": f"{minute}m",
                "alertname": name,
                "exp_alerts": [{"exp_labels": {**each, "severity": severities[name]}} for each in labels],
            }
            for name, labels in expected.items()
        ],
    }
    run = _run(alerts, test, folder)
    return "" if run.returncode == 0 else run.stdout + run.stderr


def first_firing(watched: Watched, folder: Path) -> dict[str, int]:
    """The minute after the fault in which each alert fires first; negative if that is before the fault."""
    minutes = [BEFORE_MIN - 1, *range(BEFORE_MIN, BEFORE_MIN + AFTER_MIN)]
    query = 'count by (alertname) (ALERTS{alertstate="firing"})'
    test = {
        "interval": "1m",
        "input_series": list(_series(watched)),
        "promql_expr_test": [
            {"expr": query, "eval_time": f"{minute}m", "exp_samples": []} for minute in minutes
        ],
    }
    run = _run(chart_alerts(), test, folder)
    return _first(run.stdout + run.stderr)


def _run(
    alerts: Sequence[Mapping[str, Any]], test: Mapping[str, Any], folder: Path
) -> subprocess.CompletedProcess[str]:
    file = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (folder / "rules.yaml").write_text(json.dumps(rules(alerts)))
    (folder / "test.yaml").write_text(json.dumps(file))
    return subprocess.run(
        [program("promtool"), "test", "rules", "test.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def _first(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for hours, minutes, _, got in _GOT.findall(text):
        minute = 60 * int(hours or 0) + int(minutes or 0) - BEFORE_MIN
        for name in _NAME.findall(got):
            found[name] = min(minute, found.get(name, minute))
    return found


def _series(watched: Watched) -> Iterator[dict[str, str]]:
    named = {name for alert in chart_alerts() for name in re.findall(r"\bkvasir_\w+", alert["expr"])}
    for family, after in watched.after.items():
        before, first = (part.get(family) for part in (watched.before, watched.first))
        for series, value in after.series.items():
            if series.partition("{")[0] not in named:
                continue
            was = None if before is None else before.series.get(series)
            began = 0.0 if first is None else first.series.get(series, 0.0)
            if family.endswith("_timestamp_seconds"):
                # Time begins with zero for promtool.
                left = [moment - watched.wall_s + 60 * BEFORE_MIN for moment in (was or 0.0, value)]
                values = f"{left[0]:.0f}x{BEFORE_MIN} {left[1]:.0f}x{AFTER_MIN}"
            elif after.kind == "gauge":
                values = f"{'_' if was is None else f'{was:g}'}x{BEFORE_MIN} {value:g}x{AFTER_MIN}"
            else:
                was = was or 0.0
                # A counter of a process that has restarted begins again.
                grown = value - was if value >= was else value
                calm, fault = (was - began) * 60 / watched.calm_s, grown * 60 / watched.fault_s
                values = f"0+{calm:g}x{BEFORE_MIN} {calm * BEFORE_MIN + fault:g}+{fault:g}x{AFTER_MIN}"
            yield {"series": series, "values": values}


def moved(watched: Watched) -> set[str]:
    """The names of series of which a gauge changed by more than a twentieth, or a counter's rate did."""
    found = set[str]()
    for family, after in watched.after.items():
        before, first = (part.get(family) for part in (watched.before, watched.first))
        gone = set[str]() if before is None else before.series.keys() - after.series.keys()
        found |= {series.partition("{")[0] for series in gone}
        for series, value in after.series.items():
            was, began = (0.0 if part is None else part.series.get(series, 0.0) for part in (before, first))
            old, new = was, value
            if after.kind != "gauge":
                old, new = (was - began) / watched.calm_s, (value - was) / watched.fault_s
            elif family.endswith("_timestamp_seconds"):
                old, new = was - watched.wall_s, value - watched.wall_s
            if abs(new - old) > _MOVED * abs(old):
                found.add(series.partition("{")[0])
    return found


def _scaled(expression: str, scale: float) -> str:
    return re.sub(r"\[(\w+)\]", lambda found: f"[{_duration(found[1], scale)}]", expression)


def _duration(text: str, scale: float) -> str:
    number, unit = int(text[:-1]), text[-1]
    seconds = number * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
    return text if scale == 1.0 else f"{max(0, round(1000 * seconds * scale))}ms"
