"""Figures, files, pages and comparisons of runs."""

from __future__ import annotations

import json
import math
import re
from array import array
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.errors import ConfigError
from kvasir_platform.bench.client.endpoint import CallResult
from kvasir_platform.bench.figures import BenchPercentiles, figures_of, percentiles
from kvasir_platform.bench.ramp import BenchRamp, RampPlan, RampPoint
from kvasir_platform.bench.report.compare import BenchDifference, differences, unlike
from kvasir_platform.bench.report.page import as_page
from kvasir_platform.bench.report.result import (
    MOST_SAMPLES,
    BenchResult,
    as_json,
    course_of,
    read_result,
    samples_of,
)
from kvasir_platform.bench.report.tables import difference_rows, knee_line
from kvasir_platform.bench.slo import BenchSlo, parse_slo
from kvasir_platform.bench.tally import BenchTally, GapCounts
from kvasir_platform.reports.files import write_file


def ended(
    tally: BenchTally, start: float, *chunks: float, error: str = "", tokens: int | None = None
) -> None:
    tally.begin(0.0)
    end = chunks[-1] if chunks else start + 1.0
    result = CallResult(start, end, array("d", chunks), prompt_tokens=90, output_tokens=tokens, error=error)
    result.cached_tokens = 30
    tally.end(result, 100, 3)


def some_tally(count: int = 200, slower: float = 1.0, seed: int = 1) -> BenchTally:
    rng = Random(seed)
    tally = BenchTally()
    for number in range(count):
        start = number * 0.1
        first = start + slower * rng.lognormvariate(-2.3, 0.3)
        gaps = [slower * rng.lognormvariate(-4.6, 0.2) for _ in range(5)]
        chunks = [first + sum(gaps[:place]) for place in range(6)]
        ended(tally, start, *chunks)
    return tally


def result_of(tally: BenchTally, **more: Any) -> BenchResult:
    values: dict[str, Any] = {
        "url": "http://here", "model": "<m>", "api": "chat", "workload": "chat", "mode": "open loop",
        "began": "2026-01-01", "slo": BenchSlo(),
    }  # fmt: skip
    values |= {"figures": figures_of(tally, BenchSlo()), "samples": samples_of(tally)}
    return BenchResult(**(values | {"course": course_of(tally)} | more))


def test_the_figures_of_three_requests() -> None:
    tally = BenchTally()
    ended(tally, 10.0, 10.5, 10.6, 10.8)
    ended(tally, 11.0, 13.5)
    ended(tally, 12.0, error="http_500")
    found = figures_of(tally, BenchSlo(ttft_s=1.0, itl_s=0.2))
    assert (found.requests, found.succeeded, found.errors) == (3, 2, {"http_500": 1})
    assert found.elapsed_s == 3.5
    assert found.requests_per_s == pytest.approx(2 / 3.5)
    assert found.output_tokens_per_s == pytest.approx(4 / 3.5)
    assert found.slo_share == pytest.approx(1 / 3)
    assert found.goodput_per_s == pytest.approx(1 / 3.5)
    assert (found.ttft.p50, found.ttft.max) == (0.5, 2.5)
    assert found.tpot.count == 1
    assert found.tpot.mean == pytest.approx(0.15)
    assert found.itl.count == 2
    assert found.itl.mean == pytest.approx(0.15)
    assert found.prompt_token_error == pytest.approx(-0.1)
    assert found.cached_share == pytest.approx(1 / 3)


def test_the_servers_count_of_tokens_has_precedence_over_that_of_chunks() -> None:
    tally = BenchTally()
    ended(tally, 0.0, 1.0, 2.0, tokens=11)
    assert tally.output_tokens[0] == 11
    assert tally.tpot[0] == pytest.approx(0.1)


def test_without_requests_there_are_zeros() -> None:
    found = figures_of(BenchTally(), BenchSlo())
    assert (found.requests_per_s, found.slo_share, found.ttft) == (0.0, 0.0, BenchPercentiles())
    assert course_of(BenchTally()) == ()


@given(st.lists(st.floats(1e-5, 100.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_counted_gaps_have_their_quantiles_to_half_a_percent(gaps: list[float], q: float) -> None:
    counts = GapCounts()
    for gap in gaps:
        counts.add(gap)
    exact = sorted(gaps)[max(0, math.ceil(q * len(gaps)) - 1)]
    assert counts.quantile(q) == pytest.approx(exact, rel=0.0051)


def test_percentiles_are_values_that_were_measured() -> None:
    found = percentiles(range(1, 101))
    assert (found.p50, found.p90, found.p99, found.max, found.mean) == (50, 90, 99, 100, 50.5)


def test_samples_are_bounded() -> None:
    tally = BenchTally()
    for number in range(MOST_SAMPLES + 10):
        ended(tally, float(number), number + 0.5)
    assert len(samples_of(tally)["ttft"]) <= MOST_SAMPLES


def test_a_course_counts_every_request_once() -> None:
    course = course_of(some_tally())
    assert sum(each.begun for each in course) == 200
    assert course[-1].running == 0
    assert len(course) <= 120


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=500ms,itl=50ms", BenchSlo(0.5, 0.05)),
        ("e2e=10s", BenchSlo(math.inf, math.inf, 10.0)),
    ],
)
def test_an_slo_is_written_with_units(text: str, slo: BenchSlo) -> None:
    assert parse_slo(text) == slo


@pytest.mark.parametrize("text", ["ttft=500", "ttft=1s,ttft=2s", "tpot=1s", "", "ttft"])
def test_what_is_no_slo_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="with a unit, as in"):
        parse_slo(text)


def test_a_request_of_one_token_has_no_gap_to_be_too_long() -> None:
    assert BenchSlo().met(1.0, math.nan, 1.0)
    assert not BenchSlo().met(1.0, 0.2, 1.0)


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    shown = as_json(result_of(some_tally(), slo=BenchSlo(ttft_s=0.5)))
    write_file(path, json.dumps(shown), "--json")
    assert read_result(path) == json.loads(json.dumps(shown))
    assert shown["slo"]["e2e_s"] is None


@pytest.mark.parametrize("text", ["{}", "[1]", "no"])
def test_a_file_that_is_no_result_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json: no "):
        read_result(path)
    with pytest.raises(ConfigError, match="--html"):
        write_file(tmp_path / "missing" / "page.html", "", "--html")


class _Tags(HTMLParser):
    """The tags of a page, and its attributes that could name an address."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]


def ramped() -> BenchRamp:
    figures = figures_of(some_tally(50), BenchSlo())
    return BenchRamp((RampPoint(1.0, True, figures), RampPoint(2.0, False, figures)), RampPlan())


def test_a_page_stands_alone_and_escapes_what_it_shows() -> None:
    tally = some_tally()
    ended(tally, 1.0, error="http_500")
    text = as_page(result_of(tally, ramp=ramped(), notes=("a < b",), interrupted=True))
    tags = _Tags()
    tags.feed(text)
    assert tags.addresses == []
    assert "script" not in tags.tags
    assert tags.tags.count("svg") == 7
    assert "<m>" not in text
    assert "&lt;m&gt;" in text
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"\bnan\b|\binf\b", text)


def test_a_page_without_any_success_has_no_charts() -> None:
    tally = BenchTally()
    ended(tally, 1.0, error="connection")
    assert "<svg" not in as_page(result_of(tally))


def test_the_knee_in_words() -> None:
    assert knee_line(ramped()) == "90% of the requests meet the SLO up to 1 requests/s, and no longer at 2"


def compared(slower: float) -> dict[str, BenchDifference]:
    before = as_json(result_of(some_tally(seed=1)))
    after = as_json(result_of(some_tally(slower=slower, seed=2)))
    return {each.name: each for each in differences(before, after)}


def test_a_slower_run_is_worse_with_confidence() -> None:
    found = compared(1.5)
    mean = found["TTFT mean"]
    assert mean.verdict == "worse"
    assert mean.change == pytest.approx(0.5, abs=0.1)
    assert mean.low is not None
    assert mean.high is not None
    assert mean.low < mean.change < mean.high
    assert mean.worse_than(0.2)
    assert not mean.worse_than(0.6)
    assert compared(0.5)["TPOT p50"].verdict == "better"


def test_chance_is_no_difference() -> None:
    found = compared(1.0)
    assert {found[name].verdict for name in ("TTFT mean", "TTFT p50", "TPOT mean", "E2E p95")} == {"same"}
    assert not any(found[name].worse_than(0.0) for name in ("TTFT mean", "TPOT mean"))


def test_confidence_is_right_nineteen_times_in_twenty() -> None:
    wrong = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        before, after = ({"samples": {"ttft": rng.lognormal(0, 0.4, 80)}, "figures": RATES} for _ in range(2))
        found = differences(before, after, seed)[0]
        wrong += found.verdict != "same"
    assert wrong <= 5


RATES = {"requests_per_s": 10.0, "output_tokens_per_s": 100.0, "goodput_per_s": 9.0}


def test_a_lower_rate_is_worse() -> None:
    rate = BenchDifference("goodput/s", "", 10.0, 9.0, "higher")
    assert (rate.verdict, rate.worse_than(0.05), rate.worse_than(0.15)) == ("unknown", True, False)
    assert difference_rows([rate])[0] == ("goodput/s", "10.00", "9.00", "-10.0%", "-", "")


def test_a_run_without_a_success_cannot_be_compared() -> None:
    empty = as_json(result_of(BenchTally()))
    with pytest.raises(ValueError, match="nothing to compare"):
        differences(empty, empty)


def test_runs_of_other_workloads_are_told() -> None:
    before, after = (as_json(result_of(some_tally(5), workload=name)) for name in ("chat", "rag"))
    assert unlike(before, after) == ["workload: chat before, rag after"]
