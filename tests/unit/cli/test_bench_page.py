"""The page of `kvasir bench` as a browser shows it; screenshots are kept in build/screenshots."""

from __future__ import annotations

from array import array
from pathlib import Path
from random import Random

import pytest
from tests.kit.browser.charts import open_charts

from kvasir_platform.bench.client.endpoint import CallResult
from kvasir_platform.bench.figures import figures_of
from kvasir_platform.bench.ramp import BenchRamp, RampPlan, RampPoint
from kvasir_platform.bench.report.page import as_page
from kvasir_platform.bench.report.result import BenchResult, course_of, samples_of
from kvasir_platform.bench.slo import BenchSlo
from kvasir_platform.bench.tally import BenchTally


def result() -> BenchResult:
    rng, tally = Random(1), BenchTally()
    for number in range(300):
        start = number * 0.2
        first = start + rng.lognormvariate(-2.0, 0.4)
        chunks = array("d", [first + place * 0.02 for place in range(20)])
        tally.begin(0.0)
        tally.end(CallResult(start, chunks[-1], chunks), 100, 20)
    figures = figures_of(tally, BenchSlo())
    points = tuple(RampPoint(float(rate), rate < 8, figures) for rate in (1, 2, 4, 8))
    return BenchResult(
        url="http://127.0.0.1:8000",
        model="kvasir-tiny",
        api="chat",
        workload="chat:rate=5",
        mode="open loop",
        began="2026-11-25T12:00:00+00:00",
        slo=BenchSlo(),
        figures=figures,
        samples=samples_of(tally),
        course=course_of(tally),
        notes=("prompts had +6.0% tokens of what was asked for",),
        ramp=BenchRamp(points, RampPlan()),
    )


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_shows_its_charts_whole_and_asks_for_nothing(tmp_path: Path, dark: bool) -> None:
    path = tmp_path / "bench.html"
    path.write_text(as_page(result()), encoding="utf-8")
    opened, charts = open_charts(path, "bench-dark" if dark else "bench", tmp_path, dark=dark, height=2000)
    assert [chart.cut for chart in charts] == [()] * 7
    assert (opened.console, opened.foreign) == ((), ())
    assert opened.screenshot.stat().st_size > 30_000
