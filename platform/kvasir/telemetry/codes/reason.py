"""What is said of each code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """One code. `status` is the HTTP status, or 0 for an outcome without an error response: none can be sent,
    or a response was already started."""

    code: str
    status: int
    meaning: str
    remedy: str
