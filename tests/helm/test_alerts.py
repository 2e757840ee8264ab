"""Each alert of the chart fires under the series that it is about, and not without them, as promtool of
Prometheus finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.observability.alert_cases import (
    CASES,
    COLD_MINUTE,
    EVEN,
    ITL,
    MINUTE,
    UNEVEN,
    AlertCase,
    always,
    appears,
    cached,
    for_long,
    grows,
    missed,
    requests,
    spread,
)
from tests.kit.observability.promtool import chart_alerts, wrong_firing

BY_ALERT = {case.alert: case for case in CASES}
FIRST, SECOND = ({"model": model, "slo": "chat"} for model in ("a", "b"))


def test_every_alert_has_a_case_and_every_case_an_alert() -> None:
    assert [alert["alert"] for alert in chart_alerts()] == [case.alert for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_under_what_it_is_about_and_names_where(case: AlertCase, tmp_path: Path) -> None:
    assert wrong_firing(case.fires, case.minute, {case.alert: [case.labels]}, tmp_path) == ""


@pytest.mark.parametrize(
    ("alert", "number"),
    [(case.alert, number) for case in CASES for number in range(len(case.quiet))],
)
def test_an_alert_does_not_fire_without_what_it_is_about(alert: str, number: int, tmp_path: Path) -> None:
    case = BY_ALERT[alert]
    series = {**case.fires, **case.quiet[number]}
    assert wrong_firing(series, case.minute, {alert: []}, tmp_path) == ""


def test_a_cold_cache_of_one_model_is_not_blamed_for_late_tokens_of_another(tmp_path: Path) -> None:
    late = [for_long(requests(90, 10, model) | missed("ttft", "prefill", 10, model)) for model in "ab"]
    series = late[0] | late[1] | cached(True, "a") | cached(False, "b")
    expected = {
        "KvasirTtftColdCache": [FIRST],
        "KvasirHitRateFell": [{"model": "a"}],
        "KvasirTtftPrefill": [FIRST, SECOND],
    }
    assert wrong_firing(series, COLD_MINUTE, expected, tmp_path) == ""
    series |= for_long(requests(990, 10, "a"))
    expected = {"KvasirTtftColdCache": [], "KvasirTtftPrefill": [SECOND]}
    assert wrong_firing(series, COLD_MINUTE, expected, tmp_path) == ""


def test_stalls_of_one_model_do_not_hide_slow_steps_of_another(tmp_path: Path) -> None:
    late = [requests(90, 10, model) | missed("itl", "decode", 10, model) for model in "ab"]
    series = late[0] | late[1] | spread(ITL, UNEVEN, "a") | spread(ITL, EVEN, "b")
    expected = {"KvasirItlStall": [FIRST], "KvasirItlBatch": [SECOND]}
    assert wrong_firing(series, MINUTE, expected, tmp_path) == ""


def test_the_first_internal_error_of_a_router_fires_though_its_counter_begins_with_it(tmp_path: Path) -> None:
    bugs = 'kvasir_requests_total{model="%s",outcome="internal_error",instance="%s"}'
    series = {
        bugs % ("a", "old"): always(1),
        bugs % ("a", "new"): appears(),
        bugs % ("b", "old"): always(1),
    }
    expected = {"KvasirInternalErrors": [{"model": "a"}]}
    assert wrong_firing(series, MINUTE, expected, tmp_path) == ""


def test_errors_of_a_model_are_named_beside_those_of_another(tmp_path: Path) -> None:
    series = {
        f'kvasir_requests_total{{model="{model}",outcome="internal_error"}}': grows(1) for model in "ab"
    }
    expected = {"KvasirInternalErrors": [{"model": "a"}, {"model": "b"}]}
    assert wrong_firing(series, MINUTE, expected, tmp_path) == ""
