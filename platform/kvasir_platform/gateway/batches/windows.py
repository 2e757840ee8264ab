"""Completion windows of batches. The command line reads them too, and refuses one before it uploads."""

from __future__ import annotations

import re

_WINDOW = re.compile(r"([1-9]\d{0,4})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}


def window_s(window: str) -> int | None:
    """Return the seconds of a window such as 90m, 24h or 7d, None for text that is none."""
    parts = _WINDOW.fullmatch(window)
    return None if parts is None else int(parts[1]) * _SECONDS[parts[2]]
