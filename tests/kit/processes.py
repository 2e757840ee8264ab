"""Helpers for other processes, each of which may exit and be reaped at any time."""

from __future__ import annotations

import socket

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


def free_port(host: str = "127.0.0.1") -> int:
    """A port of the host on which no process listens."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
