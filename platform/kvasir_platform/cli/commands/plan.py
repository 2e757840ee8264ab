"""`kvasir plan`: what to run for a load, before anything is bought."""

from __future__ import annotations

import argparse
from importlib import metadata
from pathlib import Path

from kvasir.core.errors import ConfigError
from kvasir_platform.capacity.analysis.advice import hardware_advice
from kvasir_platform.capacity.analysis.arithmetic import arithmetic
from kvasir_platform.capacity.analysis.batches import batch_rows
from kvasir_platform.capacity.analysis.curves import CostCurve, cost_curves
from kvasir_platform.capacity.analysis.layouts import cheapest_first, layout_rows
from kvasir_platform.capacity.analysis.memory import memory_budgets
from kvasir_platform.capacity.analysis.optimisations import optimisations
from kvasir_platform.capacity.analysis.uncertainty import error_bars
from kvasir_platform.capacity.search import PlanRequest, search
from kvasir_platform.capacity.written import deployment_of, values_of
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.plan.charts import cost_chart
from kvasir_platform.cli.plan.data import as_data
from kvasir_platform.cli.plan.page import page
from kvasir_platform.cli.plan.read import read_request
from kvasir_platform.cli.plan.report import (
    PlanReport,
    advice_lines,
    arithmetic_lines,
    batch_lines,
    summary,
)
from kvasir_platform.reports.files import check_folder, write_file
from kvasir_platform.reports.png import draw

_CONTEXT = 8192


def plan(args: argparse.Namespace, output: CommandOutput) -> int:
    """Print the report, and write the files that are asked for. Return 1 if no plan meets the SLO. Raises
    ConfigError for options that contradict each other or the model."""
    check_folder(args.html, "--html")
    check_folder(args.png, "--png")
    request = read_request(args)
    whole = args.advice or args.html is not None or output.json
    report = _report(request, args, whole=whole, batches=args.batches or output.json)
    for line in summary(report):
        output.text(line)
    if args.advice:
        output.text()
        for line in advice_lines(report):
            output.text(line)
    if args.batches:
        output.text()
        for line in batch_lines(report):
            output.text(line)
    if args.explain and report.arithmetic:
        output.text("\nthe arithmetic of plan 1")
        for line in arithmetic_lines(report):
            output.text(line)
    output.data(as_data(report))
    _write_charts(report, args, output)
    if args.write is not None:
        _write(report, request, args.write, output)
    return 0 if report.plans else 1


def _report(request: PlanRequest, args: argparse.Namespace, *, whole: bool, batches: bool) -> PlanReport:
    result = search(request)
    best = result.best
    most = request.model.config.max_positions
    context = args.context or (min(_CONTEXT, most) if most else _CONTEXT)
    return PlanReport(
        result,
        plans=tuple((each, error_bars(each, request.traffic.peak)) for each in result.cheapest()),
        memory=memory_budgets(request, context),
        advice=hardware_advice(result) if whole else (),
        layouts=cheapest_first(layout_rows(result)) if whole else (),
        sheet=optimisations(result, acceptance=args.acceptance) if whole else (),
        arithmetic=arithmetic(best, request) if best is not None and (whole or args.explain) else (),
        batches=batch_rows(request) if batches else (),
    )


def _write_charts(report: PlanReport, args: argparse.Namespace, output: CommandOutput) -> None:
    if args.png is None and args.html is None:
        return
    output.text("... plans for other SLOs, for the charts")
    curves: tuple[CostCurve, ...] = cost_curves(report.result)
    if args.html is not None:
        write_file(args.html, page(report, curves), "--html")
        output.text(f"page: {args.html}")
    if args.png is not None:
        draw([cost_chart(curve) for curve in curves], args.png)
        output.text(f"chart: {args.png}")


def _write(report: PlanReport, request: PlanRequest, folder: Path, output: CommandOutput) -> None:
    best = report.result.best
    if best is None:
        output.text("nothing is written: no plan meets the SLO")
        return
    # They take a quarter of a second to import, and most calls write nothing.
    from kvasir.config.load.loader import loads
    from kvasir.config.load.yaml_document import render

    spec = render(deployment_of(best, request))
    # What is written is valid by the same checks as any other file.
    loads(spec, str(folder / "kvasir.yaml"))
    values = render(values_of(best, request, _version()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--write {folder}: {error.strerror or error}") from error
    head = f"# {best.title}\n# Made by `kvasir plan` from computed times, not from measurements.\n"
    for name, text in (("kvasir.yaml", spec), ("values.yaml", values)):
        write_file(folder / name, head + text, "--write")
    output.text(f"\nplan 1 is in {folder}/kvasir.yaml; next: kvasir check -f {folder}/kvasir.yaml")
    output.text(f"for a cluster: helm install RELEASE helm/kvasir -f {folder}/values.yaml")


def _version() -> str | None:
    try:
        return metadata.version("kvasir")
    except metadata.PackageNotFoundError:
        return None
