"""Test durations: the slowest tests and groups, and seconds per folder against a budget, written to a file.

A budget is three times what a folder takes on two idle cores, and a test that makes its folder several times
slower exceeds it. On a slower machine every folder takes more, and so may every folder: the median of what
folders take of their budgets, which is a third on two idle cores, says how much slower a machine is.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import pytest
from tests.kit.suite.failures import Failures
from tests.kit.suite.schedule import group_of

ROOT = Path(__file__).resolve().parents[3]
BUDGETS = ROOT / "tests" / "budgets.toml"
SLOWEST = 50
_TIMES_IDLE = 3
_FEWEST_FOLDERS = 8
"""The median of fewer says more of the folders than of the machine."""
_MOST_SLOWNESS = 2.0


def folder_of(test: str) -> str:
    """The folder that a test's time counts for: two levels under tests/ for unit tests, otherwise one."""
    parts = test.partition("::")[0].split("/")
    depth = 3 if parts[1:2] == ["unit"] else 2
    return "/".join(parts[: min(depth, len(parts) - 1)])


def slowness(taken: Mapping[str, float], budgets: Mapping[str, float]) -> float:
    """How many times slower than two idle cores the machine was by what its folders took, from 1 to 2."""
    parts = [seconds / budgets[folder] for folder, seconds in taken.items() if folder in budgets]
    if len(parts) < _FEWEST_FOLDERS:
        return 1.0
    return min(max(1.0, _TIMES_IDLE * median(parts)), _MOST_SLOWNESS)


def over_budget(kind: str, taken: Mapping[str, float], budgets: Mapping[str, float]) -> list[str]:
    """Describe each folder that took more than its budget on a machine as slow as this one."""
    slower = slowness(taken, budgets)
    return [
        f"{folder}, {kind} tests: {seconds:.0f} s, and their budget in tests/budgets.toml is "
        f"{budgets[folder]} s, on this machine {budgets[folder] * slower:.0f} s"
        for folder, seconds in taken.items()
        if folder in budgets and seconds > budgets[folder] * slower
    ]


class Durations:
    """Sums the phases of each test, of fast and slow ones apart, or as `kind` if it is given."""

    def __init__(self, kind: str | None = None, failures: Failures | None = None) -> None:
        self._kind = kind
        self._failures = failures
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
        budgets = tomllib.loads(BUDGETS.read_text())
        return [
            each
            for kind in self._tests
            for each in over_budget(kind, self.folders(kind), budgets.get(kind, {}))
        ]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail an otherwise successful run if a folder is over its budget."""
        over = self.over_budget()
        if session.exitstatus == pytest.ExitCode.OK and over:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._failures is not None:
            self._failures.add(f"OVER BUDGET {each}" for each in over)

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
