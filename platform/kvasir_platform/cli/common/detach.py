"""`kvasir up --detach`: the same start in a process that outlives the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvasir_platform.cluster.local.runtime_dir import RuntimeDir

_POLL_S = 0.2


def detach(log: Path) -> int | None:
    """Fork. Return the pid of the child in the parent; None in the child, which has left the terminal and
    writes to `log`. Call before any thread or event loop exists."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, descriptor in ((nothing, 0), (target, 1), (target, 2)):
        os.dup2(source, descriptor)
    return None


def follow(
    child: int,
    runtime: RuntimeDir,
    log: Path,
    write: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Repeat the child's output until it has printed that it is ready (return 0) or has ended (return its
    exit status)."""
    shown = 0
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        state = runtime.read()
        shown += _copy(log, shown, write)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if state is not None and state.pid == child and state.announced:
            return 0
        pause(_POLL_S)


def _copy(log: Path, start: int, write: Callable[[str], None]) -> int:
    try:
        with log.open("rb") as stream:
            stream.seek(start)
            data = stream.read()
    except FileNotFoundError:
        return 0
    if data:
        write(data.decode(sys.stdout.encoding, "replace"))
    return len(data)
