"""Counts what tests start that takes seconds: engines of vLLM, and deployments by `kvasir up`.

Every process of a run, those that tests start included, adds lines to one file, whose path is in its
environment.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest

_VARIABLE = "KVASIR_TESTS_STARTED"


def count_start(kind: str, name: str) -> None:
    """Count one `kind` that is started, such as `engine`; `name` says which."""
    if path := os.environ.get(_VARIABLE):
        with Path(path).open("a") as file:
            file.write(f"{kind}\t{name}\n")


class Starts:
    """Prints the counts at the end of a run."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvasir-starts-")
        self._file = Path(self._folder.name) / "started"
        self._file.touch()
        os.environ[_VARIABLE] = str(self._file)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print how many of each kind were started, and which."""
        counts: dict[str, Counter[str]] = {}
        for line in self._file.read_text().splitlines():
            kind, _, name = line.partition("\t")
            counts.setdefault(kind, Counter())[name] += 1
        for kind, names in sorted(counts.items()):
            terminalreporter.section(f"{names.total()} started: {kind}")
            for name, times in names.most_common():
                terminalreporter.write_line(f"{times:5}  {name}")

    def pytest_unconfigure(self) -> None:
        """Remove the file."""
        os.environ.pop(_VARIABLE, None)
        self._folder.cleanup()
