"""What workers without requests cost a router as `kvasir up` starts it: it hears of each that it is alive.

Few workers show what the router's own process costs, and more of them what each adds.
"""

from __future__ import annotations

import time
from pathlib import Path

from load_tests.report import Row, median
from load_tests.scenarios.gateway.measure import say
from load_tests.scenarios.gateway.packages import Packages
from load_tests.scenarios.gateway.systems import Stand, await_serving
from load_tests.scenarios.gateway.usage import cpu_s
from load_tests.vocabulary import large_model

BEGINNING = "fleet, "
"""How the names of the rows of fleets begin."""
FLEETS = (8, 64)
_SETTLE_S, _WINDOW_S, _WINDOWS = 5.0, 4.0, 7


def idle_rows(folder: Path, *, scale: float) -> list[Row]:
    """A row for each of FLEETS; `scale` shortens the measurements. Raise ProcessError."""
    rows = []
    for workers in FLEETS:
        say(f"{workers} idle workers")
        within = folder / f"idle-{workers}"
        within.mkdir()
        value, spread = median(_idle_ms(within, workers, scale))
        rows.append(
            Row(
                f"{BEGINNING}{workers} idle workers",
                value,
                "CPU ms a second",
                "lower",
                spread=spread,
                note=f"median of {_WINDOWS} windows of {_WINDOW_S:g} s; half of them prefill, half decode",
            )
        )
    return rows


def _idle_ms(folder: Path, workers: int, scale: float) -> list[float]:
    """The CPU of a router in milliseconds a second, in each window."""
    engine = {"kind": "sim", "block_size": 16, "max_num_seqs": 1024}
    pools = [
        {"name": role, "role": role, "replicas": workers // 2, "engine": engine}
        for role in ("prefill", "decode")
    ]
    found = []
    with Stand(folder, large_model(), Packages()) as stand:
        system = stand.as_up(fields={"pools": pools})
        await_serving(stand.client(), system)
        time.sleep(_SETTLE_S * scale)
        for _ in range(_WINDOWS):
            began, used = time.monotonic(), cpu_s(system.process.pid)
            time.sleep(_WINDOW_S * scale)
            found.append(1e3 * (cpu_s(system.process.pid) - used) / (time.monotonic() - began))
    return found
