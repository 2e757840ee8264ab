"""The result of a check before the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `remedy` is what to do about it, "" if it is ok."""

    check: str
    level: Level
    message: str
    remedy: str = ""
