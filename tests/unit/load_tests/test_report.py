"""A report says for each row what measured it."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from load_tests import report
from load_tests.report import Row, Run, configuration, merged, read, this_run, write

FIRST = Run("aaaaaaa", "2026-01-02", "2 cores of one", "python -m bench")


def row(name: str, run: Run | None = None, note: str = "") -> Row:
    return Row(name, 1.5, "ms", "lower", 2.0, spread=(1.0, 2.0), note=note, seeds=(1,), run=run)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "REPORTS", tmp_path)


def test_a_row_is_read_as_it_was_written() -> None:
    rows = [row("a", FIRST, "a note"), row("b", replace(FIRST, commit="bbbbbbb"))]
    assert read(write("some", "make bench-some", rows)) == rows


def test_rows_of_this_run_have_the_commit_the_day_and_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python", "-m", "bench", "--rounds", "3"])
    before = datetime.now(UTC).date().isoformat()
    (found,) = read(write("some", "make bench-some", [row("a")], "abcdef0", settings="4 workers"))
    assert found.run is not None
    assert found.run.commit == "abcdef0"
    assert before <= found.run.date <= datetime.now(UTC).date().isoformat()
    assert re.match(r"python -m bench --rounds 3; \d+ usable CPUs; .*4 workers$", found.run.configuration)


def test_rows_that_are_kept_are_not_stamped_again() -> None:
    path = write("some", "make bench-some", [row("a", FIRST)])
    write("some", "make bench-some", [*read(path), row("b")], "bbbbbbb")
    kept, fresh = read(path)
    assert kept.run == FIRST
    assert fresh.run == this_run("bbbbbbb")


def test_runs_are_stored_once_and_numbered_in_the_table() -> None:
    second = replace(FIRST, commit="bbbbbbb", machine="4 cores of another")
    path = write("some", "make bench-some", [row("a", FIRST), row("b", second), row("c", FIRST)])
    assert len(json.loads(path.read_text())["runs"]) == 2
    table = path.with_suffix(".md").read_text()
    assert "| 2 | `bbbbbbb` | 2026-01-02 | 4 cores of another | python -m bench |" in table
    assert re.findall(r"^\| ([abc]) \|.*\| (\d) \|$", table, re.MULTILINE) == [
        ("a", "1"),
        ("b", "2"),
        ("c", "1"),
    ]


def test_a_single_run_is_one_line_above_the_table() -> None:
    table = write("some", "make bench-some", [row("a", FIRST)]).with_suffix(".md").read_text()
    assert "Commit `aaaaaaa`, date 2026-01-02, on 2 cores of one. Configuration: python -m bench." in table
    assert "| run |" not in table


def test_folders_of_this_machine_are_no_part_of_a_configuration() -> None:
    arguments = ["-m", "bench", "/home/me/trace.jsonl", "--keep=/tmp/kept.jsonl", "--only", "a,b"]
    assert configuration(arguments).startswith("python -m bench trace.jsonl --keep=kept.jsonl --only a,b; ")


def test_the_packages_that_run_engines_are_named_with_their_versions() -> None:
    assert re.search(r"vllm(-cpu)? \d", configuration(["-m", "bench"]))


def test_a_report_of_an_older_commit_is_read_with_what_it_knows(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    stored = {"name": "a", "value": 1.0, "unit": "ms", "better": "lower", "met": None}
    header = {"command": "make bench-old", "commit": "aaaaaaa", "machine": "2 cores"}
    path.write_text(json.dumps(header | {"rows": [stored, stored | {"commit": "bbbbbbb"}]}))
    runs = [each.run for each in read(path)]
    assert [(run.commit, run.machine) for run in runs if run] == [
        ("aaaaaaa", "2 cores"),
        ("bbbbbbb", "2 cores"),
    ]
    assert {run.date for run in runs if run} == {"unknown: the report has no dates"}


def measured(name: str, value: float, commit: str = "") -> Row:
    run = Run(commit, "2026-01-02", "a machine", "python -m scaling") if commit else None
    return Row(name, value, "s", "lower", run=run)


def test_rows_that_were_not_measured_keep_place_value_and_run() -> None:
    kept = [measured("a", 1, "old"), measured("b", 2, "old"), measured("c", 3, "old")]
    assert merged(kept, [measured("b", 5), measured("d", 6)]) == [
        kept[0],
        measured("b", 5),
        kept[2],
        measured("d", 6),
    ]


def test_every_committed_report_is_the_source_of_its_page() -> None:
    for path in sorted((Path(report.__file__).parent / "reports").glob("*.json")):
        page = path.with_suffix(".md").read_text()
        assert report.page(json.loads(path.read_text()), path.stem) == page, path.name
