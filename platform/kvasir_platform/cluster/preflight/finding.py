"""What a check before the start has to say, to whoever starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `remedy` says what to do, "" when it is ok."""

    check: str
    level: Level
    message: str
    remedy: str = ""
