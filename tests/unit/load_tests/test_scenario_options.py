"""A scenario explains itself on `--help`, and measures nothing then."""

from __future__ import annotations

import subprocess
import sys

import pytest
from load_tests.suite.catalog import SCENARIOS

_LONGEST_S = 30.0


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_help_explains_a_scenario_and_measures_nothing(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", SCENARIOS[name].module, "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=_LONGEST_S,
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.startswith("usage: ")
    assert " ".join(SCENARIOS[name].command.split()[:2]) in done.stdout
