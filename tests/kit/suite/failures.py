"""What failed in the runs that make up `make test`, at the end of each: of a long log only the end is read.

The runs are given one file, to which each adds its failures.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest


class Failures:
    """Adds the tests that failed to a file, and prints what runs before this one added to it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the name of a test that failed."""
        if report.failed:
            self._failed.append(f"{report.nodeid} ({report.when})")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the name of a file whose tests cannot be collected."""
        if report.failed:
            self._failed.append(f"{report.nodeid} (collection)")

    def add(self, failures: Iterable[str]) -> None:
        """Keep what failed and is no test."""
        self._failed.extend(failures)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what failed before, and add what failed in this run."""
        before = self._file.read_text().splitlines() if self._file.exists() else []
        if before:
            terminalreporter.section("failed before, in tests that ran apart from these", red=True)
            for each in before:
                terminalreporter.write_line(each)
        self._file.parent.mkdir(exist_ok=True)
        with self._file.open("a") as file:
            file.writelines(f"{each}\n" for each in self._failed)
