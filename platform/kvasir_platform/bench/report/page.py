"""The report as one page: no script, no external address, charts as inline SVG, light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from kvasir_platform.bench.ramp import BenchRamp
from kvasir_platform.bench.report.chart import ChartLine, chart
from kvasir_platform.bench.report.result import BenchResult
from kvasir_platform.bench.report.tables import (
    FIGURES_HEAD,
    RAMP_HEAD,
    error_rows,
    figure_rows,
    ramp_rows,
    rate_lines,
)

_STYLE = (
    ":root{color-scheme:light dark;--line:#8886;--a:#0969da;--b:#bc4c00;--c:#1a7f37}"
    "@media(prefers-color-scheme:dark){:root{--a:#58a6ff;--b:#f0883e;--c:#56d364}}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .75rem;border-bottom:1px solid "
    "var(--line);text-align:right}td:first-child,th:first-child{text-align:left}"
    "figure{display:inline-block;margin:0 1rem 1rem 0}figcaption{font-size:13px}.note{font-weight:600}"
)
_CDF_POINTS = 200


def as_page(result: BenchResult) -> str:
    """The page."""
    title = f"{result.model}: {result.workload}"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1">',
        f"<title>kvasir bench: {html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(result.url)}, {html.escape(result.api)}, {html.escape(result.mode)}, "
        f"{html.escape(result.began)}. SLO: {html.escape(str(result.slo))}.</p>",
        *(f"<p class=note>{html.escape(note)}</p>" for note in result.notes),
    ]
    if result.interrupted:
        parts.append("<p class=note>The run was interrupted: these are the figures until then.</p>")
    if result.ramp is not None:
        parts += _ramp(result.ramp)
    parts += [
        "<h2>Times</h2>",
        _table(FIGURES_HEAD, figure_rows(result.figures)),
        "<h2>Rates</h2>",
        "<ul>",
        *(f"<li>{html.escape(line)}</li>" for line in rate_lines(result.figures)),
        "</ul>",
        *_charts(result),
    ]
    if errors := error_rows(result.figures):
        parts += ["<h2>Errors</h2>", _table(("KIND", "COUNT", "FIRST MESSAGE"), errors)]
    return "\n".join(parts) + "\n"


def _charts(result: BenchResult) -> Iterable[str]:
    curves = [
        ChartLine(name, color, _distribution(result.samples.get(key, ()), scale))
        for key, name, color, scale in (("ttft", "TTFT", "a", 1e3), ("e2e", "E2E", "b", 1e3))
    ]
    if any(each.points for each in curves):
        yield chart("share of requests (%) by ms at most", curves, 100.0)
    if tpot := _distribution(result.samples.get("tpot", ()), 1e3):
        yield chart("share of requests (%) by mean ITL, ms", [ChartLine("TPOT", "c", tpot)], 100.0)
    course = result.course
    if len(course) > 1:
        yield chart(
            "TTFT over the run (s), ms",
            [
                ChartLine("p50", "a", [(x.at_s, x.ttft_p50_s * 1e3) for x in course if x.begun]),
                ChartLine("p95", "b", [(x.at_s, x.ttft_p95_s * 1e3) for x in course if x.begun]),
            ],
        )
        yield chart(
            "output tokens/s over the run (s)",
            [ChartLine("tokens/s", "a", [(x.at_s, x.output_tokens_per_s) for x in course])],
        )
        yield chart(
            "running requests over the run (s)",
            [ChartLine("running", "c", [(x.at_s, float(x.running)) for x in course])],
        )


def _ramp(ramp: BenchRamp) -> Iterable[str]:
    points = [(each.rate, each.figures) for each in ramp.points]
    yield "<h2>Ramp</h2>"
    yield _table(RAMP_HEAD, ramp_rows(ramp))
    yield chart(
        "requests/s asked for, and served within the SLO",
        [
            ChartLine("served", "b", [(rate, found.requests_per_s) for rate, found in points]),
            ChartLine("goodput", "a", [(rate, found.goodput_per_s) for rate, found in points]),
        ],
    )
    yield chart(
        "TTFT p95 by requests/s, ms", [ChartLine("p95", "a", [(r, f.ttft.p95 * 1e3) for r, f in points])]
    )


def _distribution(values: Sequence[float], scale: float) -> list[tuple[float, float]]:
    """The share of values that do not exceed each of some of them."""
    ordered = sorted(values)
    step = max(1, math.ceil(len(ordered) / _CDF_POINTS))
    places = sorted({*range(0, len(ordered), step), len(ordered) - 1}) if ordered else []
    return [(ordered[i] * scale, (i + 1) / len(ordered) * 100) for i in places]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{html.escape(each)}</th>" for each in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{html.escape(each)}</td>" for each in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</table>"])
