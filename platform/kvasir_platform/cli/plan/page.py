"""The report of `kvasir plan` as one page of HTML that needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvasir_platform.capacity.analysis.curves import CostCurve
from kvasir_platform.cli.plan.charts import cost_chart
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
from kvasir_platform.reports.charts import line_chart
from kvasir_platform.reports.document import charts, document, table


def page(report: PlanReport, curves: Sequence[CostCurve]) -> str:
    """Return the page."""
    request = report.result.request
    traffic, target = request.traffic, request.target
    figures = [line_chart(cost_chart(curve)) or "<p>No plan meets any of these SLOs.</p>" for curve in curves]
    promise = f"TTFT {target.ttft_s:g} s" + ("" if traffic.embeds else f", ITL {target.itl_s * 1e3:g} ms")
    title = f"Plan for {request.model.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{traffic.rate:.3g} requests/s, {traffic.peak:.3g} at the peak; {traffic.prompt:,.0f} prompt "
        f"tokens, {traffic.cached:,.0f} of them cached, and {traffic.output:,.0f} output tokens. SLO: "
        f"{promise} for {target.attainment:.0%} of requests.</p>",
        "<h2>The cheapest plans</h2>",
        _plans(report),
        f"<h2>Cost against SLO</h2>{charts(figures)}",
        "<h2>Memory of one device, in GiB</h2>",
        table(MEMORY_HEAD, [memory_row(each) for each in report.memory], words=True),
        "<h2>Which hardware, in stages</h2>",
        table(ADVICE_HEAD, _advice(report), words=True),
        "<h2>Which layout, if replicas do both parts</h2>",
        table(LAYOUT_HEAD, [layout_cells(each) for each in report.layouts], words=True),
        "<h2>Which optimisation pays</h2>",
        table(
            SHEET_HEAD,
            [(e.name, "yes" if e.pays else "no", e.reason, e.field) for e in report.sheet],
            words=True,
        ),
        f"<h2>Arithmetic</h2><pre>{escape(chr(10).join(arithmetic_lines(report)))}</pre>",
        f"<p>Coefficients: {escape('; '.join(sorted(set(source_texts(report)))) or 'none')}. Prices are "
        "list prices unless a catalogue file replaced them.</p>",
    ]
    return document(title, "".join(parts))


def _plans(report: PlanReport) -> str:
    if not report.plans:
        return "<p>No plan meets the SLO at this load with this hardware.</p>"
    rows = [plan_row(number, *each) for number, each in enumerate(report.plans, 1)]
    notes = [
        line
        for number, (plan, _) in enumerate(report.plans, 1)
        for line in (*plan_notes(number, plan, report), "")
    ]
    return table(PLAN_HEAD, rows, words=True) + f"<pre>{escape(chr(10).join(notes))}</pre>"


def _advice(report: PlanReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for each in report.advice:
        name, verdict = each.hardware.name, each.verdict
        for stage in each.stages:
            passed = "-" if stage.passed is None else "yes" if stage.passed else "no"
            rows.append((name, verdict, stage.question, passed, stage.answer))
            name = verdict = ""
    return rows
