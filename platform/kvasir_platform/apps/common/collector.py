"""Settings of Python's garbage collector for processes with a million long-lived objects.

A full collection visits every object, which stops all streams for tens of milliseconds. Objects that exist
after the start are never garbage. Later ones are collected as usual, because closed connections are in cycles
and hold their sockets until then.
"""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """Call once everything that stays is loaded."""
    gc.collect()
    gc.freeze()
