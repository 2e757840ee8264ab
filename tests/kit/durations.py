"""Test durations: the slowest fifty tests, and seconds per folder against a budget, written to a file.

A budget is three times what a folder takes on two idle cores, so that a busy machine stays within it, and a
test that makes its folder several times slower does not.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUDGETS = ROOT / "tests" / "budgets.toml"
SLOWEST = 50


def folder_of(test: str) -> str:
    """The folder that a test's time counts for: two levels under tests/ for unit tests, otherwise one."""
    parts = test.partition("::")[0].split("/")
    depth = 3 if parts[1:2] == ["unit"] else 2
    return "/".join(parts[: min(depth, len(parts) - 1)])


class Durations:
    """Sums the phases of each test. `kind` is the part of the suite: fast, slow or soak."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the duration of set-up, call or teardown."""
        self._tests[report.nodeid] += report.duration  # type: ignore[assignment]

    def folders(self) -> Counter[str]:
        """Seconds by folder."""
        seconds: Counter[str] = Counter()
        for test, taken in self._tests.items():
            seconds[folder_of(test)] += taken
        return seconds

    def over_budget(self) -> list[str]:
        """Describe each folder that exceeded its budget."""
        budgets = tomllib.loads(BUDGETS.read_text()).get(self._kind, {})
        return [
            f"{folder}: {taken:.0f} s, and its budget in tests/budgets.toml is {budgets[folder]} s"
            for folder, taken in self.folders().items()
            if taken > budgets.get(folder, float("inf"))
        ]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail an otherwise successful run if a folder is over its budget."""
        if session.exitstatus == pytest.ExitCode.OK and self.over_budget():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the file, and print the folders."""
        lines = [f"{taken:9.2f} s  {folder}" for folder, taken in self.folders().most_common()]
        slowest = [f"{taken:9.2f} s  {test}" for test, taken in self._tests.most_common(SLOWEST)]
        if not lines:
            return
        target = ROOT / "build" / f"test-durations-{self._kind}.txt"
        target.parent.mkdir(exist_ok=True)
        target.write_text("\n".join(["folders", *lines, "", f"slowest {SLOWEST}", *slowest, ""]))
        terminalreporter.section(f"durations by folder (slowest tests: build/{target.name})")
        for line in [*lines, *(f"OVER BUDGET {each}" for each in self.over_budget())]:
            terminalreporter.write_line(line)
