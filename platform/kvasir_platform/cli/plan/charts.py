"""Cost against SLO as charts."""

from __future__ import annotations

from kvasir_platform.capacity.analysis.curves import CHEAPEST, CostCurve
from kvasir_platform.reports.charts import LineChart, PlottedLine

_NAMES = {"ttft": "TTFT", "itl": "ITL"}


def cost_chart(curve: CostCurve) -> LineChart:
    """Return the chart of a curve: its promise across, and dollars for an hour up."""
    factor, unit = (1e3, "ms") if curve.asked_s < 1.0 else (1.0, "s")
    name = _NAMES[curve.promise]
    return LineChart(
        f"Cost against {name}",
        f"promised {name} in {unit}",
        "dollars for an hour, over a day",
        tuple(
            PlottedLine(
                line.name,
                tuple((seconds * factor, dollars) for seconds, dollars in line.points),
                dashed=line.name == CHEAPEST,
            )
            for line in curve.lines
        ),
        logarithmic=True,
        mark=curve.asked_s * factor,
    )
