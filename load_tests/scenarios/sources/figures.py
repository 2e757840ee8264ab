"""The CPU time of processes that were measured, and rows beside a peer's figure."""

from __future__ import annotations

import resource
from dataclasses import replace

from load_tests.report import Row


def children_cpu_s() -> float:
    """CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def beside(row: Row, peer: float, what: str, target_ratio: float | None = None) -> Row:
    """The row with the figure of a peer or a floor, `what`, which its note names."""
    note = "; ".join(filter(None, (f"peer: {what}", row.note)))
    return replace(row, peer=peer, ratio=row.value / peer, target_ratio=target_ratio, note=note)
