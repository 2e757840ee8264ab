"""The report of `kvasir plan` as one page of HTML that needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvasir_platform.capacity.analysis.curves import CostCurve
from kvasir_platform.cli.plan.report import (
    ADVICE_HEAD,
    LAYOUT_HEAD,
    MEMORY_HEAD,
    PLAN_HEAD,
    SHEET_HEAD,
    PlanReport,
    arithmetic_lines,
    layout_cells,
    memory_row,
    plan_notes,
    plan_row,
    source_texts,
)
from kvasir_platform.cli.plan.svg import chart, title_of

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
  color: #1b1f24; background: #fff; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem; font-size: 13px; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #d8dee4; vertical-align: top; }
th { background: #f6f8fa; font-weight: 600; }
svg { max-width: 40rem; width: 100%; font: 12px system-ui, sans-serif; }
svg .grid { stroke: #e3e7eb; } svg .asked { stroke: #888; stroke-dasharray: 3 3; }
pre { background: #f6f8fa; padding: 1rem; overflow-x: auto; font-size: 13px; white-space: pre-wrap; }
.charts { display: flex; flex-wrap: wrap; gap: 2rem; } figure { margin: 0; flex: 1 1 28rem; }
@media (prefers-color-scheme: dark) { body { background: #0d1117; color: #e6edf3; }
  th, pre { background: #161b22; } th, td { border-color: #30363d; } svg text { fill: #e6edf3; }
  svg .grid { stroke: #30363d; }
  svg [stroke="#111"] { stroke: #e6edf3; } svg [fill="#111"] { fill: #e6edf3; } }
"""


def page(report: PlanReport, curves: Sequence[CostCurve]) -> str:
    """Return the page."""
    request = report.result.request
    traffic, target = request.traffic, request.target
    figures = "".join(
        f"<figure><figcaption><b>{escape(title_of(curve))}</b></figcaption>{chart(curve)}</figure>"
        for curve in curves
    )
    promise = f"TTFT {target.ttft_s:g} s" + ("" if traffic.embeds else f", ITL {target.itl_s * 1e3:g} ms")
    title = f"Plan for {request.model.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{traffic.rate:.3g} requests/s, {traffic.peak:.3g} at the peak; {traffic.prompt:,.0f} prompt "
        f"tokens, {traffic.cached:,.0f} of them cached, and {traffic.output:,.0f} output tokens. SLO: "
        f"{promise} for {target.attainment:.0%} of requests.</p>",
        "<h2>The cheapest plans</h2>",
        _plans(report),
        f'<h2>Cost against SLO</h2><div class="charts">{figures}</div>',
        "<h2>Memory of one device, in GiB</h2>",
        _table(MEMORY_HEAD, [memory_row(each) for each in report.memory]),
        "<h2>Which hardware, in stages</h2>",
        _table(ADVICE_HEAD, _advice(report)),
        "<h2>Which layout, if replicas do both parts</h2>",
        _table(LAYOUT_HEAD, [layout_cells(each) for each in report.layouts]),
        "<h2>Which optimisation pays</h2>",
        _table(SHEET_HEAD, [(e.name, "yes" if e.pays else "no", e.reason, e.field) for e in report.sheet]),
        f"<h2>Arithmetic</h2><pre>{escape(chr(10).join(arithmetic_lines(report)))}</pre>",
        f"<p>Coefficients: {escape('; '.join(sorted(set(source_texts(report)))) or 'none')}. Prices are "
        "list prices unless a catalogue file replaced them.</p>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _plans(report: PlanReport) -> str:
    if not report.plans:
        return "<p>No plan meets the SLO at this load with this hardware.</p>"
    rows = [plan_row(number, *each) for number, each in enumerate(report.plans, 1)]
    notes = [
        line
        for number, (plan, _) in enumerate(report.plans, 1)
        for line in (*plan_notes(number, plan, report), "")
    ]
    return _table(PLAN_HEAD, rows) + f"<pre>{escape(chr(10).join(notes))}</pre>"


def _advice(report: PlanReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for each in report.advice:
        name, verdict = each.hardware.name, each.verdict
        for stage in each.stages:
            passed = "-" if stage.passed is None else "yes" if stage.passed else "no"
            rows.append((name, verdict, stage.question, passed, stage.answer))
            name = verdict = ""
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
