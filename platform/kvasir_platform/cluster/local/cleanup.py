"""Cleans up after a supervisor that was killed, crashed, or hangs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from kvasir_platform.cluster.local.janitor import Janitor, Leftovers
from kvasir_platform.cluster.local.runtime_dir import DeploymentState, RuntimeDir, ended

# Time for the janitor after the orderly stop.
_JANITOR_S = 30.0
_EXIT_S = 5.0
_POLL_S = 0.05


def stop_supervisor(
    runtime: RuntimeDir, state: DeploymentState, pause: Callable[[float], None] = time.sleep
) -> bool:
    """Ask the running supervisor to stop, wait for the longest time that its stop takes, and kill it after
    that. Return whether one ran. Not for the process that holds the lock."""
    holder = runtime.holder()
    if holder is None:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        supervisor = psutil.Process(holder)
        supervisor.terminate()
        if not _released(runtime, state.stop_s + _JANITOR_S, pause):
            supervisor.kill()
            _released(runtime, _JANITOR_S, pause)
        _wait_exit(supervisor, pause)
    return True


def _released(runtime: RuntimeDir, timeout_s: float, pause: Callable[[float], None]) -> bool:
    """Wait for the lock, not for the process: a zombie that is not reaped has ended too."""
    for _ in range(round(timeout_s / _POLL_S)):
        if runtime.holder() is None:
            return True
        pause(_POLL_S)
    return False


def _wait_exit(process: psutil.Process, pause: Callable[[float], None]) -> None:
    """After the lock is released, the interpreter still has to exit. A zombie has ended, even if it is not
    reaped."""
    for _ in range(round(_EXIT_S / _POLL_S)):
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return
        pause(_POLL_S)


def sweep(runtime: RuntimeDir) -> Leftovers:
    """Kill and remove everything that the last state and the marker attribute to a deployment whose
    supervisor has ended; nothing after an orderly stop."""
    state = runtime.read()
    if state is None or ended(state):
        return Leftovers()
    janitor = Janitor(state.deployment_id, started_at=state.started_at, supervised=False)
    seen = janitor.shared_memory(janitor.processes(state.processes)) | set(state.shared_memory)
    killed = janitor.kill(state.processes)
    files = janitor.remove(seen, Path(state.temp_dir))
    runtime.write(msgspec.structs.replace(state, phase="stopped", processes=(), shared_memory=()))
    return Leftovers(killed.killed, files.removed, killed.remaining + files.remaining)
