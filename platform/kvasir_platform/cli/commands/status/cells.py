"""The cells of a deployment over several regions, as `kvasir status` shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvasir_platform.cli.common.output import CommandOutput, table

_HEAD = (
    "CELL",
    "STATE",
    "NETWORK",
    "MODEL",
    "REVISION",
    "READY",
    "WAIT",
    "SENT",
    "RUNNING",
    "LOST",
    "REASON",
)


def print_cells(cells: Sequence[dict[str, Any]], output: CommandOutput) -> None:
    """Print the table of cells, if there are any; `cells` are CellViews as JSON."""
    if cells:
        output.text("\n" + table(_HEAD, [row for cell in cells for row in cell_rows(cell)]))


def cell_rows(cell: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the lines of one cell: one for each model and revision, at least one."""
    network, sent = cell["network_s"], sum(cell["sent"].values())
    running = cell["in_flight"] or cell["received"]
    state = "draining" if cell["draining"] else cell["state"]
    first = (cell["cell"], state, "-" if network is None else f"{1000 * network:.0f} ms")
    last = (str(sent), str(running), str(cell["lost"]), cell["reason"])
    models = [
        (each["model"], each["revision"][:12], str(each["ready"]), f"{each['queue_s']:.1f} s")
        for each in cell["models"]
    ] or [("-", "-", "0", "-")]
    rows = [(*first, *models[0], *last)]
    return rows + [("", "", "", *more, "", "", "", "") for more in models[1:]]
