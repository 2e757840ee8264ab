"""What a worker says when its streams say nothing: how busy it is, and that it lives.

A router cannot tell an idle worker from a frozen one by what does not come, so that something has to come.
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
    """Tell changes of `load` every `interval_s`, and the load as it is whenever nothing was said for
    `heartbeat_s`. Runs while the session has a connection. A router that has enough to read gets no
    heartbeats on top: they must not be what its session is lost of."""
    while True:
        current, kv = load(), session.take_deferred()
        due = clock.now() + _GRAIN_S >= session.said_s + heartbeat_s and not session.link.half_full
        if current != session.load or kv is not None or due:
            session.load = current
            push(session, StepBatch(load=current, kv=kv))
        next_beat = session.said_s + heartbeat_s - clock.now()
        await clock.sleep(min(interval_s, next_beat) if next_beat > 0 else interval_s)
