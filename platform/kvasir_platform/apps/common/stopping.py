"""Orderly stop of a process without an event loop."""

from __future__ import annotations

import signal


class Stop:
    """Whether a stop was requested. A plain flag: signal handlers may nest, and an Event that is set from a
    handler deadlocks on its own lock."""

    requested = False


def stop_on_signals(stop: Stop) -> None:
    """Make SIGTERM and SIGINT request an orderly stop."""

    def request(_signum: int, _frame: object) -> None:
        stop.requested = True

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, request)
