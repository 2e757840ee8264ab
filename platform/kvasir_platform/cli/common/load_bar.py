"""Shows the progress of load: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvasir.core.quantiles import quantile
from kvasir_platform.cli.common.output import CommandOutput

if TYPE_CHECKING:
    from kvasir_platform.bench.run import BenchProgress

_WIDTH = 24
_LINE_S = 10.0
_RECENT = 200


class LoadBar:
    """Redraws one line on a terminal. Elsewhere it prints a line every ten seconds."""

    def __init__(self, output: CommandOutput) -> None:
        self._output = output
        self._printed_s = -math.inf
        self._drawn = False

    def say(self, text: str) -> None:
        """Print a line for good."""
        self.clear()
        self._output.text(f"... {text}")

    def tick(self, progress: BenchProgress, now: float) -> None:
        """Show how far the load is."""
        if not progress.total:
            return
        if self._output.is_terminal:
            self._output.redraw(progress_line(progress)[:110])
            self._drawn = True
        elif now - self._printed_s >= _LINE_S:
            self._output.text(f"... {progress_line(progress)}")
            self._printed_s = now

    def clear(self) -> None:
        """Remove the bar."""
        if self._drawn:
            self._output.redraw("")
        self._drawn = False


def progress_line(progress: BenchProgress) -> str:
    """The bar as text."""
    tally = progress.tally
    done = tally.succeeded + tally.failed
    filled = min(_WIDTH, round(done / progress.total * _WIDTH))
    parts = [
        f"{progress.step} [{'#' * filled}{'.' * (_WIDTH - filled)}] {done:,}/{progress.total:,}",
        f"{tally.running} running",
    ]
    if tally.succeeded:
        recent = tally.ttft[-_RECENT:]
        parts.append(f"TTFT p50 {quantile(recent, 0.5) * 1e3:,.0f} ms")
    if tally.failed:
        parts.append(f"{tally.failed} errors")
    return ", ".join(parts)
