"""Keeps log handlers open when a library configures logging.

`logging.config.dictConfig` closes every handler of the process, also those of loggers that it does not
configure. vLLM calls it when an engine starts. Ray Serve keeps its handler, which then has lost the file that
it writes to; after a restart of Ray's head, Serve's controller asks each replica for the path of that file,
and replaces the replicas that cannot answer.
"""

from __future__ import annotations

import atexit
import logging


def keep_open() -> None:
    """Exempt the handlers that exist from being closed by a later configuration of logging; they are flushed
    and closed when the process exits. Loggers, levels and later handlers are not affected. Idempotent."""
    # dictConfig closes what is in this list, and Python has no public way to take a handler out of it.
    handlers: list[object] = logging._handlerList  # type: ignore[attr-defined]
    kept = handlers[:]
    del handlers[: len(kept)]
    if kept:
        atexit.register(logging.shutdown, kept)
