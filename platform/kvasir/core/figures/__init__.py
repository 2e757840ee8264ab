"""Figures of many objects, read and packed at once: as a request ends, dozens of them are, several times.

Read one by one, each takes several times as many instructions (by hand). The C++ module is used if it was
built; the Python twin gives the same results.
"""

from __future__ import annotations

try:
    from kvasir.core.figures._figures import Arrays, Fields, Numbers, Packer
except ImportError:  # no compiler when it was installed
    from kvasir.core.figures._twin import Arrays, Fields, Numbers, Packer  # type: ignore[assignment]

__all__ = ["Arrays", "Fields", "Numbers", "Packer"]
