"""Reports of an invalid kvasir.yaml: all problems at once, each with its position and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.core.errors import ConfigError

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]
"""Plain JSON data."""

_SHOWN = 25


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. `line` and `column` count from 1, and are 0 if unknown; `field` is a dotted path such as
    `pools[0].role`, "" for the whole file."""

    file: str
    line: int = 0
    column: int = 0
    field: str = ""
    found: str = ""
    expected: str = ""

    @property
    def place(self) -> str:
        """The position as `file:line:column`, which editors and terminals link."""
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


class SpecError(ConfigError):
    """The deployment spec, or the other file that `subject` names, is invalid; `problems` has all findings in
    the order of the file."""

    code = "invalid_spec"

    def __init__(self, problems: Sequence[Problem], subject: str = "the deployment spec") -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.file, p.line, p.column)))
        super().__init__(_render(self.problems, subject))


def _render(problems: Sequence[Problem], subject: str) -> str:
    count = len(problems)
    lines = [f"{subject} has " + ("1 problem:" if count == 1 else f"{count} problems:")]
    for problem in problems[:_SHOWN]:
        lines.append(f"  {problem.place}" + (f"  {problem.field}" if problem.field else ""))
        lines.append(f"      found     {problem.found}")
        lines.append(f"      expected  {problem.expected}")
    if count > _SHOWN:
        lines.append(f"  … and {count - _SHOWN} more")
    return "\n".join(lines)
