"""What a check has found, and whether it is what was expected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class CheckError(Exception):
    """A check that could not be made, or did not come to its end: what was waited for, or what is missing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`expected` is empty for what is shown only."""

    what: str
    found: str
    expected: str = ""
    met: bool = True

    def line(self) -> str:
        mark = ("ok " if self.met else "BAD") if self.expected else "   "
        wanted = f" (expected: {self.expected})" if self.expected else ""
        return f"  {mark} {self.what}: {self.found}{wanted}"


def shown(what: str, found: Any) -> Finding:
    return Finding(what, str(found))


def at_most(what: str, found: float, bound: float, unit: str) -> Finding:
    return Finding(what, f"{found:.3g} {unit}", f"at most {bound:g} {unit}", found <= bound)


def equal(what: str, found: Any, expected: Any) -> Finding:
    return Finding(what, str(found), str(expected), found == expected)


def holds(what: str, found: bool) -> Finding:
    return Finding(what, "yes" if found else "no", "yes", found)
