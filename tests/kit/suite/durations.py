"""Test durations: the slowest tests and groups, and seconds per folder against a budget, written to a file.

A budget is three times what a folder takes on two idle cores, so that a busy machine stays within it, and a
test that makes its folder several times slower does not.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from tests.kit.suite.schedule import group_of

ROOT = Path(__file__).resolve().parents[3]
BUDGETS = ROOT / "tests" / "budgets.toml"
SLOWEST = 50


def folder_of(test: str) -> str:
    """The folder that a test's time counts for: two levels under tests/ for unit tests, otherwise one."""
    parts = test.partition("::")[0].split("/")
    depth = 3 if parts[1:2] == ["unit"] else 2
    return "/".join(parts[: min(depth, len(parts) - 1)])


class Durations:
    """Sums the phases of each test, of fast and slow ones apart, or as `kind` if it is given."""

    def __init__(self, kind: str | None = None) -> None:
        self._kind = kind
        self._tests: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the duration of set-up, call or teardown."""
        kind = self._kind or ("slow" if "slow" in report.keywords else "fast")
        self._tests[kind][report.nodeid] += report.duration  # type: ignore[assignment]

    def folders(self, kind: str) -> Counter[str]:
        """Seconds by folder."""
        seconds: Counter[str] = Counter()
        for test, taken in self._tests[kind].items():
            seconds[folder_of(test)] += taken
        return seconds

    def groups(self, kind: str) -> Counter[str]:
        """Seconds by group of the schedule."""
        seconds: Counter[str] = Counter()
        for test, taken in self._tests[kind].items():
            seconds[group_of(test)] += taken
        return seconds

    def over_budget(self) -> list[str]:
        """Describe each folder that exceeded its budget."""
        all_budgets = tomllib.loads(BUDGETS.read_text())
        return [
            f"{folder}, {kind} tests: {taken:.0f} s, and their budget in tests/budgets.toml is {budget} s"
            for kind in self._tests
            for folder, taken in self.folders(kind).items()
            if taken > (budget := all_budgets.get(kind, {}).get(folder, float("inf")))
        ]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail an otherwise successful run if a folder is over its budget."""
        if session.exitstatus == pytest.ExitCode.OK and self.over_budget():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the files, and print the folders."""
        for kind, tests in self._tests.items():
            lines = [f"{taken:9.2f} s  {folder}" for folder, taken in self.folders(kind).most_common()]
            slowest = [f"{taken:9.2f} s  {test}" for test, taken in tests.most_common(SLOWEST)]
            groups = [f"{taken:9.2f} s  {group}" for group, taken in self.groups(kind).most_common(SLOWEST)]
            target = ROOT / "build" / f"test-durations-{kind}.txt"
            target.parent.mkdir(exist_ok=True)
            target.write_text(
                "\n".join(["folders", *lines, "", "groups", *groups, "", f"slowest {SLOWEST}", *slowest, ""])
            )
            terminalreporter.section(f"{kind} tests by folder (slowest: build/{target.name})")
            for line in lines:
                terminalreporter.write_line(line)
        for each in self.over_budget():
            terminalreporter.write_line(f"OVER BUDGET {each}")
