"""Load reports and heartbeats that a worker sends when its streams send nothing.

A router cannot distinguish an idle worker from a frozen one without messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from kvasir.core.messages import WorkerMessage
from kvasir.core.requests import EngineLoad, StepBatch
from kvasir.ports.clock import Clock
from kvasir_workers.server.session import RouterSession

_GRAIN_S = 1e-6


async def report(
    session: RouterSession,
    load: Callable[[], EngineLoad],
    push: Callable[[RouterSession, WorkerMessage], None],
    clock: Clock,
    *,
    interval_s: float,
    heartbeat_s: float,
) -> NoReturn:
    """Report changes of `load` every `interval_s`, and the current load if nothing was sent for
    `heartbeat_s`. Runs while the session has a connection. A router with pending frames gets no heartbeats:
    they must not overflow its session."""
    while True:
        current, kv = load(), session.take_deferred()
        due = clock.now() + _GRAIN_S >= session.said_s + heartbeat_s and not session.link.half_full
        if current != session.load or kv is not None or due:
            session.load = current
            push(session, StepBatch(load=current, kv=kv))
        next_beat = session.said_s + heartbeat_s - clock.now()
        await clock.sleep(min(interval_s, next_beat) if next_beat > 0 else interval_s)
