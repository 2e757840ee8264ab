"""The memory that this process may still use: the machine's, or its container's."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def available_memory(cgroup: Path = CGROUP) -> tuple[int, str]:
    """Return the available memory in bytes, and what bounds it: the machine or this control group."""
    available, limit = psutil.virtual_memory().available, "the machine's"
    for maximum, current, cache in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        bound, used = _number(cgroup / maximum), _number(cgroup / current)
        if bound is None or used is None:
            continue
        reclaimable = _stat(cgroup / cache, "inactive_file")
        room = max(0, bound - used + reclaimable)
        if room < available:
            available, limit = room, "this container's limit"
    return available, limit


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _stat(path: Path, name: str) -> int:
    try:
        match = re.search(rf"^{name} (\d+)$", path.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return 0
    return int(match.group(1)) if match else 0
