"""Other processes as a test sees them: each may end, and be reaped, between two questions about it."""

from __future__ import annotations

import psutil


def lives(process: psutil.Process) -> bool:
    """Whether it runs; one that has ended and waits for its parent does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> str:
    """Its arguments in one line; empty for one that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
