"""Helpers for other processes, each of which may exit and be reaped at any time."""

from __future__ import annotations

import psutil


def lives(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> str:
    """Its arguments in one line; empty if it has exited."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
