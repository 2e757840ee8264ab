"""Settings of Python's garbage collector for processes with a million long-lived objects.

A full collection visits every object, which stops all streams for tens of milliseconds. Objects that exist
after the start are never garbage. Later ones are collected as usual, which can take minutes on an idle
process: what holds a socket must not be in a cycle.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (5_000, 5, 4)
"""With Python's own (700, 10, 10), objects of the requests in flight are visited again and again: 2 % of a
router's time (by hand). Collections of the oldest generation stay about as frequent."""


def freeze_gc() -> None:
    """Call once everything that stays is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect nothing meanwhile, while only things that stay are made, as by an import of a large library."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
