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
_REPEATED = 4
"""Heartbeats after which an unchanged load is said again: whatever a router assumed otherwise ends with it.
For a router, a heartbeat without a message costs less than half of one with (by hand)."""


async def report(
    session: RouterSession,
    load: Callable[[], EngineLoad],
    push: Callable[[RouterSession, WorkerMessage], None],
    beat: Callable[[RouterSession], None],
    clock: Clock,
    *,
    interval_s: float,
    heartbeat_s: float,
) -> NoReturn:
    """Report changes of `load` every `interval_s`. If nothing was sent for `heartbeat_s`, send a heartbeat:
    without a message, or with the current load if it is the first one after any other message, or one of
    _REPEATED. Runs while the session has a connection. A router with pending frames gets no heartbeats: they
    must not overflow its session."""
    while True:
        now, current, kv = clock.now() + _GRAIN_S, load(), session.take_deferred()
        due = now >= max(session.said_s, session.beat_s) + heartbeat_s and not session.link.half_full
        news = session.said_s != session.reported_s or now >= session.reported_s + _REPEATED * heartbeat_s
        if current != session.load or kv is not None or (due and news):
            session.load = current
            push(session, StepBatch(load=current, kv=kv))
            session.reported_s = session.said_s
        elif due:
            beat(session)
        next_beat = max(session.said_s, session.beat_s) + heartbeat_s - clock.now()
        await clock.sleep(min(interval_s, next_beat) if next_beat > 0 else interval_s)
