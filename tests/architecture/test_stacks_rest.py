"""Whatever starts routers and workers for a test checks their invariants when the test has succeeded."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTED_BY = "tests.kit.lab.processes"
CHECKED_BY = "tests.kit.lab.invariants"
CHECKS = {"at_rest", "ends_at_rest"}
NO_ROUTER = {"tests/faults/test_kit_processes.py", "tests/faults/test_kit_netns.py"}
"""They start programs of their own."""


def imported(file: Path) -> dict[str, set[str]]:
    """The names that a file imports, by module."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return found


def test_whatever_starts_processes_of_a_lab_checks_that_they_are_at_rest() -> None:
    starting, unchecked = set(), set()
    for folder in ("tests", "load_tests"):
        for file in (ROOT / folder).rglob("*.py"):
            names = imported(file)
            if "Processes" in names.get(STARTED_BY, ()):
                name = file.relative_to(ROOT).as_posix()
                starting.add(name)
                if not names.get(CHECKED_BY, set()) & CHECKS:
                    unchecked.add(name)
    assert starting > NO_ROUTER
    assert unchecked == NO_ROUTER
