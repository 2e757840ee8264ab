"""Python's garbage collector beside an index and tokenizers of hundreds of megabytes.

It looks at what was allocated since it looked last, and now and then at everything, while requests wait. What
a process holds once it has started is never garbage, and a request makes too few cycles to look for them
after each.
"""

from __future__ import annotations

import gc

YOUNG = 50_000
"""Containers allocated before the youngest are looked at: some hundred requests' worth, a few megabytes."""


def leave_alone_what_is_here() -> None:
    """To be called once everything that stays has been loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
