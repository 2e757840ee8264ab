"""An event loop of uvloop that pytest's timeout ends.

The timeout raises from the handler of a signal. asyncio's loops pass that on to whoever runs them, where
uvloop tells its exception handler alone, so that a test would wait on.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop


def new_uvloop() -> asyncio.AbstractEventLoop:
    """Return a loop that stops when the handler of a signal fails the test, with a RuntimeError."""
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    loop.set_exception_handler(_stop_where_failed)
    return loop


def _stop_where_failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    loop.default_exception_handler(context)
    if isinstance(context.get("exception"), pytest.fail.Exception):
        for task in asyncio.all_tasks(loop):
            task.print_stack()
        loop.stop()
