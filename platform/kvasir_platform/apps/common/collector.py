"""Python's garbage collector beside tokenizers and modules of a million objects.

Now and then it looks at everything there is, for tens of milliseconds in which no stream goes on. What a
process holds once it has started is never garbage; what comes after that is looked at as ever, since lost
connections lie in cycles and hold their sockets until then.
"""

from __future__ import annotations

import gc


def freeze_gc() -> None:
    """To be called once everything that stays has been loaded."""
    gc.collect()
    gc.freeze()
