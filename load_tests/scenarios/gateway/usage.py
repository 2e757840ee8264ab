"""CPU and memory of a process and its descendants, from /proc.

Requests per second would measure the machine, because client and workers share its cores; CPU seconds of the
process under test measure its cost.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_PROC = Path("/proc")


def tree(pid: int) -> list[int]:
    """The process and its running descendants."""
    found, waiting = [], [pid]
    while waiting:
        each = waiting.pop()
        if not (_PROC / str(each)).exists():
            continue
        found.append(each)
        with contextlib.suppress(OSError):
            for task in (_PROC / str(each) / "task").iterdir():
                with contextlib.suppress(OSError):
                    waiting += map(int, (task / "children").read_text().split())
    return found


def cpu_s(pid: int) -> float:
    """CPU seconds (user and system) of all running threads of the process tree, in nanosecond resolution."""
    total = 0
    for each in tree(pid):
        with contextlib.suppress(OSError):
            for task in (_PROC / str(each) / "task").iterdir():
                with contextlib.suppress(OSError):
                    total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def resident_bytes(pid: int) -> int:
    """Resident memory of one process; 0 if it has exited."""
    try:
        pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def proportional_bytes(pid: int) -> int:
    """Proportional memory of the process tree, so that shared pages count once."""
    total = 0
    for each in tree(pid):
        with contextlib.suppress(OSError):
            for line in (_PROC / str(each) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return total
