"""Checks of internal state that also run with `python -O`."""

from __future__ import annotations


def require(holds: object, what: str) -> None:
    """Raise AssertionError(`what`) unless `holds` is true."""
    if not holds:
        raise AssertionError(what)
