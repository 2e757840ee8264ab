"""Types of options that take a number: their bounds, and what argparse says of text outside them."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable

_MOST = 1e9


def positive(text: str) -> float:
    """Return a number above 0. Raises ArgumentTypeError."""
    value = _parsed(text)
    if not 0.0 < value < _MOST:
        raise ArgumentTypeError(f"{text!r}: a number above 0 and below {_MOST:g}")
    return value


def share(text: str) -> float:
    """Return a number from 0 to 1. Raises ArgumentTypeError."""
    return number(0.0, 1.0)(text)


def number(least: float, most: float) -> Callable[[str], float]:
    """Return the type of numbers from `least` to `most`."""

    def parse(text: str) -> float:
        value = _parsed(text)
        if not least <= value <= most:
            raise ArgumentTypeError(f"{text!r}: a number from {least:g} to {most:g}")
        return value

    return parse


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return the type of whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > len(str(most)) or not least <= int(text) <= most:
            raise ArgumentTypeError(f"{text!r}: a whole number from {least} to {most}")
        return int(text)

    return parse


def _parsed(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
