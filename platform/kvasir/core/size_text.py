"""How messages and logs write sizes."""

from __future__ import annotations

_MIB, _GIB = 1 << 20, 1 << 30


def size_text(count: int) -> str:
    """Return `count` bytes in MiB or GiB."""
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"
