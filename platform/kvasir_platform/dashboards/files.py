"""Writes the dashboards as files for Grafana and for the chart: `python -m kvasir_platform.dashboards.files
helm/kvasir/files/dashboards`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvasir_platform.dashboards.cost_boards import COST
from kvasir_platform.dashboards.fleet_boards import FLEET, ROUTING
from kvasir_platform.dashboards.memory_boards import KV, REQUEST, SCALING
from kvasir_platform.dashboards.panels import grafana

DASHBOARDS = (FLEET, ROUTING, KV, SCALING, COST, REQUEST)


def dashboard_files() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return {f"{board.uid}.json": json.dumps(grafana(board), indent=1) + "\n" for board in DASHBOARDS}


def write_dashboards(folder: Path) -> None:
    """Write the files, and remove those of dashboards that no longer exist."""
    made = dashboard_files()
    for path in folder.glob("*.json"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_dashboards(Path(sys.argv[1]))
