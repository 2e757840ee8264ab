"""The declaration of a scenario: its rows, the files that they depend on, and how it is run.

A test holds the committed reports against it, so that a row that is missing, or that was measured before its
code changed, is seen without a benchmark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

ANY = "…"
"""Stands for a part of a row's name that only a run can know, as a speed-up."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A report and what makes it.

    `rows` are the names of its rows; one with ANY stands for at least one row. `optional` are rows that only
    some machines or runs have. `paths` are globs of git, from the root of the repository, of the files that
    the rows depend on; the rows are stale when more than `lines` of their lines, removed and added together,
    have changed since. `module` runs with `arguments`, whose fields in braces are named by `needs`, in about
    `minutes`."""

    report: str
    command: str
    module: str
    rows: tuple[str, ...]
    paths: tuple[str, ...]
    lines: int
    minutes: int
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """The declared rows that are not among those names."""
        found = set(names)
        return tuple(row for row in self.rows if not _found(row, found))

    def undeclared(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the names that are declared neither as rows nor as optional ones."""
        known = {*self.rows, *self.optional}
        forms = [_form(each) for each in known if ANY in each]
        return tuple(
            name for name in names if name not in known and not any(form.fullmatch(name) for form in forms)
        )


def names(template: str, **parts: Iterable[object]) -> tuple[str, ...]:
    """The template, with each combination of the parts in its braces. The last part varies fastest."""
    return tuple(template.format(**dict(zip(parts, each, strict=True))) for each in product(*parts.values()))


def _found(row: str, found: set[str]) -> bool:
    if ANY not in row:
        return row in found
    form = _form(row)
    return any(form.fullmatch(name) for name in found)


def _form(row: str) -> re.Pattern[str]:
    return re.compile(".+".join(map(re.escape, row.split(ANY))))
