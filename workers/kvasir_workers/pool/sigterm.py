"""Treats SIGTERM to a Ray worker process as a request to drain, instead of its immediate end.

Python lets only the main thread set a signal handler. Ray runs an actor's code on other threads, and its own
handler, set on the main thread, exits the process. That handler calls one function of its module by name,
which this module replaces. Since these are Ray internals, the module checks that they are as expected.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import ray._private.worker as ray_worker

_EXIT = "raise_sys_exit_with_custom_error_message"


def on_sigterm(asked: Callable[[], None]) -> bool:
    """Call `asked`, on the main thread, whenever SIGTERM arrives; it must return at once. Return False if
    this version of Ray is different, and SIGTERM ends the process as before."""
    handler: Any = signal.getsignal(signal.SIGTERM)
    code = getattr(handler, "__code__", None)
    if code is None or _EXIT not in code.co_names or not hasattr(ray_worker, _EXIT):
        return False
    if getattr(handler, "__globals__", None) is not vars(ray_worker):
        return False

    def instead(*_arguments: object, **_options: object) -> None:
        asked()

    setattr(ray_worker, _EXIT, instead)
    return True
