"""Settings of Python's garbage collector for processes with a million long-lived objects.

A full collection visits every object, which stops all streams for tens of milliseconds. Objects that exist
after the start are never garbage. Later ones are collected as usual, because closed connections are in cycles
and hold their sockets until then.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 10_000
"""New objects between two collections of the young ones. Python's 700 are allocated by each request, though
only a closed connection leaves cycles; visiting this many takes well under a millisecond."""


def freeze_gc() -> None:
    """Call once everything that stays is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
