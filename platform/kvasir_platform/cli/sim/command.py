"""`kvasir sim`: a deployment in virtual time, before or beside the real one."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from kvasir.core.errors import ConfigError
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.sim.arguments import settle
from kvasir_platform.cli.sim.charts import rank_chart, rank_times, time_charts
from kvasir_platform.cli.sim.page import compare_page, run_page
from kvasir_platform.cli.sim.read import SimRequest, read_request
from kvasir_platform.cli.sim.report import (
    POOL_HEAD,
    RANK_HEAD,
    TIMES_HEAD,
    as_data,
    bound_line,
    cards_of,
    lines_of,
    pool_rows,
    rank_data,
    rank_lines,
    rank_rows,
    time_rows,
)
from kvasir_platform.reports.document import table
from kvasir_platform.reports.files import check_folder, write_file
from kvasir_platform.reports.png import draw
from kvasir_platform.sim.server.compare import RateSearch, compare
from kvasir_platform.sim.server.results import ServerResult
from kvasir_platform.sim.server.scaling import planned
from kvasir_platform.sim.server.server import ServerSimulation
from kvasir_router.decide import POLICIES

_BAR = 30


def sim(args: argparse.Namespace, output: CommandOutput) -> int:
    """Simulate, compare or show. Raises ConfigError for options that contradict each other, the action or the
    model."""
    settle(args)
    check_folder(args.html, "--html")
    check_folder(args.png, "--png")
    if args.action == "showcase":
        from kvasir_platform.cli.showcase.command import showcase

        return showcase(args, output)
    request = read_request(args)
    output.text(request.about)
    if request.note:
        output.note(request.note)
    if args.action == "compare":
        return _compare(request, args, output)
    simulation, result = run(request, output)
    output.text()
    for line in lines_of(result):
        output.text(line)
    output.data(as_data(result, request.about))
    if args.html is not None and simulation.timeline is not None:
        tables = (
            "<h2>Times</h2>" + table(TIMES_HEAD, time_rows(result)),
            "<h2>Pools</h2>" + table(POOL_HEAD, pool_rows(result)),
        )
        page = run_page("A simulated run", request.about, cards_of(result), tables, simulation.timeline)
        write_file(args.html, page, "--html")
        output.text(f"page: {args.html}")
    if args.png is not None:
        draw(time_charts({"requests": result}, result.slo), args.png, request.about)
        output.text(f"chart: {args.png}")
    return 0


def run(request: SimRequest, output: CommandOutput) -> tuple[ServerSimulation, ServerResult]:
    """Run one setting, with a bar on a terminal."""

    def tell(share: float) -> None:
        if output.is_terminal:
            done = int(share * _BAR)
            output.redraw(f"[{'#' * done}{'.' * (_BAR - done)}] {share:.0%}")

    simulation = planned(ServerSimulation(request.setting, clock=time.perf_counter, tell=tell))
    result = simulation.run()
    if output.is_terminal:
        output.redraw("")
    return simulation, result


def _compare(request: SimRequest, args: argparse.Namespace, output: CommandOutput) -> int:
    policies = tuple(dict.fromkeys(args.policies.split(",")))
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(f"--policies: {policy!r} is none of {', '.join(POLICIES)}")
    found = compare(
        replace(request.setting, frames=0),
        policies,
        RateSearch(attained=args.attained),
        clock=time.perf_counter,
        workload_at=request.at,
        tell=lambda text: output.text(f"... {text}"),
    )
    output.text()
    for line in rank_lines(found):
        output.text(line)
    output.data(rank_data(found, request.about))
    if args.html is not None:
        tables = (table(RANK_HEAD, rank_rows(found)), f"<p>{bound_line(found)}</p>")
        page = compare_page("Routing policies", request.about, (rank_chart(found),), tables)
        write_file(args.html, page, "--html")
        output.text(f"page: {args.html}")
    if args.png is not None:
        draw(rank_times(found, request.setting.slo), args.png, request.about)
        output.text(f"chart: {args.png}")
    return 0
