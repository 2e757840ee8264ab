"""Types of options that take a number or a time: bounds, and what argparse says of text outside them."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable

_MOST = 1e9
_TIMES = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MOST_S = 7 * 86_400.0


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


def seconds(text: str) -> float:
    """Return the seconds of a time such as 500ms, 90, 15m or 2h. Raises ArgumentTypeError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|[smh]?)", text)
    if found is None or not 0.0 < (value := float(found[1]) * _TIMES[found[2]]) <= _MOST_S:
        raise ArgumentTypeError(f"{text!r}: a time up to seven days, as 90, 15m or 2h")
    return value


def _parsed(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
