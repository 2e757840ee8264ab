"""Draws the times of a run as a PNG with matplotlib, which is an optional extra."""

from __future__ import annotations

import math
from pathlib import Path

from kvasir.core.errors import ConfigError
from kvasir_platform.sim.server.results import ServerResult


def draw(result: ServerResult, about: str, path: Path) -> None:
    """Write the cumulative distributions of TTFT and TPOT, with the SLO. Raises ConfigError without
    matplotlib, or if `path` cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--png needs matplotlib: install kvasir[charts], or write --html, which needs nothing"
        ) from error
    figure = Figure(figsize=(11, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = (
        ("TTFT", result.times.ttft_s, result.slo.ttft_s),
        ("time per output token", result.times.tpot_s, result.slo.itl_s),
    )
    for number, (name, values, promised) in enumerate(panels, 1):
        axes = figure.add_subplot(1, 2, number)
        known = sorted(1e3 * each for each in values if not math.isnan(each))
        axes.plot(known, [100.0 * (i + 1) / len(known) for i in range(len(known))])
        axes.axvline(1e3 * promised, color="grey", linestyle=":")
        axes.set_xscale("log")
        axes.set_xlabel(f"{name}, ms")
        axes.set_ylabel("% of requests")
        axes.set_ylim(0, 100)
    figure.suptitle(about, fontsize="x-small", wrap=True)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"--png {path}: {error.strerror or error}") from error
