"""Draws charts of lines as a PNG. The only module that imports matplotlib, which is an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvasir.core.errors import ConfigError
from kvasir_platform.reports.charts import LineChart


def draw(charts: Sequence[LineChart], path: Path, about: str = "") -> None:
    """Write the charts side by side, below `about`. Raises ConfigError, which names the option --png, without
    matplotlib, or if `path` cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--png needs matplotlib: install kvasir[charts], or write --html, which needs nothing"
        ) from error
    figure = Figure(figsize=(6.0 * len(charts), 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for number, chart in enumerate(charts, 1):
        axes = figure.add_subplot(1, len(charts), number)
        for line in chart.lines:
            points = chart.points_of(line)
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                marker="o" if line.marked else None,
                label=line.name,
                linestyle="--" if line.dashed else "-",
            )
        if chart.mark is not None:
            axes.axvline(chart.mark, color="grey", linestyle=":")
        if chart.logarithmic:
            axes.set_xscale("log")
        places = sorted({x for line in chart.lines for x, _ in chart.points_of(line)})
        if len(places) <= 9:
            axes.set_xticks(places, [f"{place:.4g}" for place in places], minor=False)
            axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=0, top=chart.most)
        axes.set_title(chart.title)
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        if len(chart.lines) > 1:
            axes.legend(fontsize="small")
    if about:
        figure.suptitle(about, fontsize="x-small", wrap=True)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"--png {path}: {error.strerror or error}") from error
