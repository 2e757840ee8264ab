"""The times of a run as charts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvasir_platform.reports.charts import LineChart, PlottedLine
from kvasir_platform.sim.server.results import ServerResult


def time_charts(result: ServerResult) -> tuple[LineChart, ...]:
    """Return the cumulative distributions of TTFT and TPOT, with the SLO."""
    return (
        _distribution("TTFT", result.times.ttft_s, result.slo.ttft_s),
        _distribution("Time per output token", result.times.tpot_s, result.slo.itl_s),
    )


def _distribution(name: str, seconds: Sequence[float], promised_s: float) -> LineChart:
    known = sorted(1e3 * each for each in seconds if not math.isnan(each))
    points = tuple((each, 100.0 * number / len(known)) for number, each in enumerate(known, 1))
    return LineChart(
        name,
        "ms",
        "% of requests",
        (PlottedLine("requests", points),),
        most=100.0,
        logarithmic=True,
        mark=1e3 * promised_s,
    )
