"""The end of a test run says what failed, and which folder of tests took more than it may."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kit.suite.durations import over_budget

ROOT = Path(__file__).resolve().parents[2]
BUDGETS = {f"tests/{letter}": 30 for letter in "abcdefghij"}
IDLE = dict.fromkeys(BUDGETS, 10.0)


def test_a_folder_that_takes_more_than_its_budget_is_named() -> None:
    assert over_budget("fast", IDLE, BUDGETS) == []
    assert over_budget("fast", IDLE | {"tests/c": 31.0}, BUDGETS) == [
        "tests/c, fast tests: 31 s, and their budget in tests/budgets.toml is 30 s, on this machine 30 s"
    ]


def test_a_slower_machine_gives_every_folder_as_much_more_and_no_folder_more_than_that() -> None:
    slow = dict.fromkeys(BUDGETS, 15.0)
    assert over_budget("slow", slow | {"tests/c": 44.0}, BUDGETS) == []
    (over,) = over_budget("slow", slow | {"tests/c": 46.0}, BUDGETS)
    assert "tests/c, slow tests: 46 s" in over
    assert "on this machine 45 s" in over


def test_a_faster_machine_takes_nothing_from_a_budget() -> None:
    assert over_budget("fast", dict.fromkeys(BUDGETS, 2.0) | {"tests/c": 29.0}, BUDGETS) == []


def test_tests_that_all_became_several_times_slower_are_no_slower_machine() -> None:
    assert len(over_budget("fast", dict.fromkeys(BUDGETS, 61.0), BUDGETS)) == len(BUDGETS)


def test_a_few_folders_alone_say_nothing_of_the_machine() -> None:
    assert len(over_budget("fast", {"tests/a": 40.0, "tests/b": 40.0}, BUDGETS)) == 2


CONFTEST = """
from pathlib import Path
from tests.kit.suite.failures import Failures

def pytest_configure(config):
    config.pluginmanager.register(Failures(Path(__file__).with_name("build") / "failures"))
"""


def test_the_last_of_several_runs_names_what_failed_in_those_before(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_failing.py").write_text("def test_that_fails():\n    assert False\n")
    (tmp_path / "test_broken.py").write_text("import a_module_that_is_missing\n")
    (tmp_path / "test_passing.py").write_text("def test_that_passes():\n    pass\n")

    def end(file: str) -> str:
        command = [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), str(tmp_path / file)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout

    assert "failed before" not in end("test_failing.py")
    end("test_broken.py")
    before = end("test_passing.py").partition("failed before")[2]
    assert "test_failing.py::test_that_fails (call)" in before
    assert "test_broken.py (collection)" in before
