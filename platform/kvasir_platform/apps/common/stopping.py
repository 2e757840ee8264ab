"""How a process that runs no event loop is asked to stop in good order."""

from __future__ import annotations

import signal


class Stop:
    """Whether a stop was asked for. A plain flag: signals may arrive one inside the other, and an Event
    that is set from a handler deadlocks on its own lock."""

    requested = False


def stop_on_signals(stop: Stop) -> None:
    """Let SIGTERM and SIGINT ask for an orderly stop."""

    def request(_signum: int, _frame: object) -> None:
        stop.requested = True

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, request)
