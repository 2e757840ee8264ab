"""Draws cost against SLO as a PNG. The only module that imports matplotlib, which is an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvasir.core.errors import ConfigError
from kvasir_platform.capacity.analysis.curves import CHEAPEST, CostCurve
from kvasir_platform.cli.plan.svg import title_of, unit_of


def draw(curves: Sequence[CostCurve], path: Path) -> None:
    """Write the charts. Raises ConfigError without matplotlib, or if `path` cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--png needs matplotlib: install kvasir[charts], or write --html, which needs nothing"
        ) from error
    figure = Figure(figsize=(6.5 * len(curves), 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for number, curve in enumerate(curves, 1):
        axes = figure.add_subplot(1, len(curves), number)
        factor, label = unit_of(curve)
        for line in curve.lines:
            cheapest = line.name == CHEAPEST
            axes.plot(
                [seconds * factor for seconds, _ in line.points],
                [dollars for _, dollars in line.points],
                marker="o",
                label=line.name,
                color="black" if cheapest else None,
                linestyle="--" if cheapest else "-",
            )
        axes.axvline(curve.asked_s * factor, color="grey", linestyle=":")
        axes.set_xscale("log")
        ticks = sorted({seconds * factor for line in curve.lines for seconds, _ in line.points})
        axes.set_xticks(ticks, [f"{tick:.4g}" for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=0)
        axes.set_title(title_of(curve))
        axes.set_xlabel(label)
        axes.set_ylabel("dollars for an hour, over a day")
        if curve.lines:
            axes.legend(fontsize="small")
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"--png {path}: {error.strerror or error}") from error
