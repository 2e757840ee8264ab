"""Figures of many objects or arrays, read at once: as a request ends, a dozen of them are read several times.

Read one by one, each takes several times as many instructions (by hand). The C++ module is used if it was
built; the Python twin gives the same results.
"""

from __future__ import annotations

try:
    from kvasir.core.figures._figures import Numbers, joined
except ImportError:  # no compiler when it was installed
    from kvasir.core.figures._twin import Numbers, joined  # type: ignore[assignment]

__all__ = ["Numbers", "joined"]
