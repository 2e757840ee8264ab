"""The times of runs as charts, and policies beside the bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvasir.core.requests import SloClass
from kvasir_platform.reports.charts import LineChart, PlottedLine, bar_chart
from kvasir_platform.sim.server.compare import PolicyComparison
from kvasir_platform.sim.server.results import ServerResult


def time_charts(runs: Mapping[str, ServerResult], slo: SloClass) -> tuple[LineChart, ...]:
    """Return the cumulative distributions of TTFT and TPOT of each run, with the SLO."""
    ttft = {name: each.times.ttft_s for name, each in runs.items()}
    tpot = {name: each.times.tpot_s for name, each in runs.items()}
    return (
        _distribution("TTFT", ttft, slo.ttft_s),
        _distribution("Time per output token", tpot, slo.itl_s),
    )


def rank_times(found: PolicyComparison, slo: SloClass) -> tuple[LineChart, ...]:
    """Return the times of each policy at the highest rate that it holds."""
    runs = {
        f"{each.policy}: {each.of_bound:.1%} of the bound": each.result
        for each in found.ranks
        if each.result is not None
    }
    return time_charts(runs, slo)


def rank_chart(found: PolicyComparison) -> str:
    """Return the goodput of each policy as a part of the bound."""
    parts = [(each.policy, (100.0 * each.of_bound,)) for each in found.ranks]
    return bar_chart("Goodput", "% of the bound", ("",), parts)


def _distribution(name: str, runs: Mapping[str, Sequence[float]], promised_s: float) -> LineChart:
    return LineChart(
        name,
        "ms",
        "% of requests",
        tuple(PlottedLine(run, _points(seconds)) for run, seconds in runs.items()),
        most=100.0,
        logarithmic=True,
        mark=1e3 * promised_s,
    )


def _points(seconds: Sequence[float]) -> tuple[tuple[float, float], ...]:
    known = sorted(1e3 * each for each in seconds if not math.isnan(each))
    return tuple((each, 100.0 * number / len(known)) for number, each in enumerate(known, 1))
