"""The report as one page: no script, no external address, charts as inline SVG, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from kvasir_platform.bench.ramp import BenchRamp
from kvasir_platform.bench.report.result import BenchResult
from kvasir_platform.bench.report.tables import (
    FIGURES_HEAD,
    RAMP_HEAD,
    error_rows,
    figure_rows,
    ramp_rows,
    rate_lines,
)
from kvasir_platform.reports.charts import LineChart, PlottedLine, line_chart
from kvasir_platform.reports.document import charts, document, table

_CDF_POINTS = 200


def as_page(result: BenchResult) -> str:
    """The page."""
    title = f"{result.model}: {result.workload}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(result.url)}, {escape(result.api)}, {escape(result.mode)}, "
        f"{escape(result.began)}. SLO: {escape(str(result.slo))}.</p>",
        *(f'<p class="note">{escape(note)}</p>' for note in result.notes),
    ]
    if result.interrupted:
        parts.append('<p class="note">The run was interrupted: these are the figures until then.</p>')
    if result.ramp is not None:
        parts += _ramp(result.ramp)
    parts += [
        "<h2>Times</h2>",
        table(FIGURES_HEAD, figure_rows(result.figures)),
        "<h2>Rates</h2>",
        "<ul>",
        *(f"<li>{escape(line)}</li>" for line in rate_lines(result.figures)),
        "</ul>",
        charts(line_chart(each) for each in _charts(result)),
    ]
    if errors := error_rows(result.figures):
        parts += ["<h2>Errors</h2>", table(("KIND", "COUNT", "FIRST MESSAGE"), errors)]
    return document(f"kvasir bench: {title}", "".join(parts))


def _charts(result: BenchResult) -> Iterable[LineChart]:
    known = result.samples
    ends = tuple(
        PlottedLine(name, _distribution(known.get(key, ())))
        for key, name in (("ttft", "TTFT"), ("e2e", "E2E"))
    )
    yield LineChart("Requests by time", "ms at most", "% of requests", ends, most=100.0)
    tpot = PlottedLine("TPOT", _distribution(known.get("tpot", ())))
    yield LineChart("Requests by mean ITL", "ms at most", "% of requests", (tpot,), most=100.0)
    course = result.course
    if len(course) < 2:
        return
    begun = [each for each in course if each.begun]
    parts = (
        PlottedLine("p50", tuple((each.at_s, each.ttft_p50_s * 1e3) for each in begun)),
        PlottedLine("p95", tuple((each.at_s, each.ttft_p95_s * 1e3) for each in begun)),
    )
    yield LineChart("TTFT over the run", "s", "ms", parts)
    tokens = PlottedLine("output", tuple((each.at_s, each.output_tokens_per_s) for each in course))
    yield LineChart("Output over the run", "s", "tokens/s", (tokens,))
    running = PlottedLine("running", tuple((each.at_s, float(each.running)) for each in course))
    yield LineChart("Running requests over the run", "s", "requests", (running,))


def _ramp(ramp: BenchRamp) -> Iterable[str]:
    points = [(each.rate, each.figures) for each in ramp.points]
    served = PlottedLine("served", tuple((rate, found.requests_per_s) for rate, found in points))
    goodput = PlottedLine("goodput", tuple((rate, found.goodput_per_s) for rate, found in points))
    ttft = PlottedLine("p95", tuple((rate, found.ttft.p95 * 1e3) for rate, found in points))
    shown = (
        LineChart("Served, and within the SLO", "requests/s asked for", "requests/s", (served, goodput)),
        LineChart("TTFT p95", "requests/s asked for", "ms", (ttft,)),
    )
    yield "<h2>Ramp</h2>"
    yield table(RAMP_HEAD, ramp_rows(ramp))
    yield charts(line_chart(each) for each in shown)


def _distribution(seconds: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Some of the times in ms, each with the percentage of times that do not exceed it."""
    ordered = sorted(seconds)
    step = max(1, math.ceil(len(ordered) / _CDF_POINTS))
    places = sorted({*range(0, len(ordered), step), len(ordered) - 1}) if ordered else []
    return tuple((ordered[i] * 1e3, (i + 1) / len(ordered) * 100) for i in places)
