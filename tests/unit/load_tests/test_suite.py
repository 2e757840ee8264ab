"""The suite of reports: what is stale, what is run, and what disturbs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from load_tests import report
from load_tests.report import Row, Run
from load_tests.suite import run as suite_run
from load_tests.suite.__main__ import main
from load_tests.suite.expected import added, not_needed, parse_expected, unexpected
from load_tests.suite.freshness import Freshness, freshness
from load_tests.suite.idle import OtherProcess, disturbing
from load_tests.suite.misses import not_missed, page, unexplained
from load_tests.suite.pages import missed_table, state_table
from load_tests.suite.run import lacking, plan, run_scenario
from load_tests.suite.scenario import Scenario, names

NOW = datetime(2026, 1, 2, 12, tzinfo=UTC)
SCENARIO = Scenario("some", "make bench-some", "bench", ("a", "b, speed-up …"), ("code/**",), 10, 1)
SEED = ("--seed", "{seed}")


class KnownCommits:
    """A history with the lines that changed since each of its commits."""

    def __init__(self, changed: Mapping[str, int]) -> None:
        self._changed = changed

    def contains(self, commit: str) -> bool:
        return commit in self._changed

    def committed(self, commit: str) -> datetime:
        return NOW - timedelta(hours=self._changed[commit])

    def changed_lines(self, commit: str, globs: Sequence[str]) -> int:
        assert globs == SCENARIO.paths
        return self._changed[commit]


HISTORY = KnownCommits({"head": 0, "near": 10, "far": 11})


def row(name: str, commit: str = "head", value: float = 1.0) -> Row:
    return Row(name, value, "ms", "lower", 2.0, run=Run(commit, "2026-01-02", "a machine", "python -m bench"))


def judged(*rows: Row) -> Freshness:
    return freshness(SCENARIO, rows, HISTORY)


WHOLE = (row("a"), row("b, speed-up 1.5"))


def test_names_are_all_combinations_with_the_last_part_varying_fastest() -> None:
    assert names("{a}-{b}", b=(1, 2), a=("x", "y")) == ("x-1", "y-1", "x-2", "y-2")


def test_a_whole_report_whose_files_did_not_change_is_fresh() -> None:
    assert judged(*WHOLE).fresh
    assert judged(row("a", "near"), WHOLE[1]).fresh


@pytest.mark.parametrize(
    ("commit", "kind", "why"),
    [
        ("gone", "commit", "1 rows at gone, which is not in the history"),
        ("near+changes", "commit", "1 rows at near+changes, with changes that no commit has"),
        ("unknown: lost", "commit", "1 rows at unknown: lost, which is not known"),
        ("far", "files", "changed lines: 11 since far; allowed are 10"),
    ],
)
def test_one_row_of_another_commit_makes_a_report_stale(commit: str, kind: str, why: str) -> None:
    assert judged(row("a", commit), WHOLE[1]).stale == {kind: why}


def test_a_row_that_is_declared_and_missing_makes_a_report_stale() -> None:
    assert judged(row("a")).stale == {"rows": "missing: b, speed-up …"}
    assert judged().missing == SCENARIO.rows


def test_a_row_that_nobody_declared_is_named() -> None:
    assert judged(*WHOLE, row("c"), row("b, speed-up ")).undeclared == ("c", "b, speed-up ")


def test_the_list_of_stale_reports_names_no_more_and_no_less_than_what_is_stale() -> None:
    stale, fresh = judged(row("a", "gone")), judged(*WHOLE)
    expected = parse_expected('[some]\ncommit = "rebased away"\n')
    assert list(unexpected([stale], expected)) == [("some", "rows")]
    assert not_needed([stale], expected) == []
    assert not_needed([fresh], expected) == [("some", "commit")]


def test_what_was_measured_and_is_stale_again_cannot_be_listed_but_new_rows_can() -> None:
    both, one = parse_expected('[some]\ncommit = "a"\nfiles = "b"\n'), parse_expected('[some]\nfiles = "b"\n')
    assert added(one, [one, both]) == []
    assert added(both, [one, both]) == [("some", "commit")]
    assert added(both, []) == []
    assert added(parse_expected('[other]\nrows = "not measured"\n'), [one, both]) == []


def test_what_is_stale_is_measured_and_what_is_named_always() -> None:
    states = [judged(*WHOLE), replace(judged(row("a")), scenario=replace(SCENARIO, report="other"))]
    assert [each.report for each in plan(states, "head")] == ["other"]
    assert [each.report for each in plan(states, "head", only=["some"])] == ["some"]


def test_all_leaves_out_only_what_this_commit_has_measured() -> None:
    states = [judged(*WHOLE), judged(row("a", "near"), WHOLE[1])]
    assert plan(states[:1], "headless", everything=True) == []
    assert plan(states[1:], "head", everything=True) == [SCENARIO]
    assert plan(states[:1], "next", everything=True) == [SCENARIO]
    changed = judged(row("a", "head+changes"), WHOLE[1])
    assert plan([changed], "head", everything=True) == [SCENARIO]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--json"], "--json is for --list"),
        (["--trace=missing.jsonl"], "--trace: missing.jsonl is no file"),
        (["--only=edge,nothing"], "no report nothing; there are edge, "),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_measured(
    argv: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert why in capsys.readouterr().err


def test_a_scenario_says_what_it_lacks() -> None:
    scenario = replace(SCENARIO, needs=("trace", "azure"))
    assert lacking(scenario, {"trace": "x", "azure": ""}) == ("azure",)


def test_what_serves_or_measures_disturbs_unless_it_started_the_suite() -> None:
    processes = [
        (1, "/usr/bin/python -m kvasir_platform.cli.main up"),
        (2, "make reports"),
        (3, "/opt/ray/core/src/ray/raylet/raylet --x"),
        (4, "python -m pytest"),
        (5, "/bin/bash -c python -m load_tests.scenarios.kv"),
    ]
    assert [(each.pid, each.what) for each in disturbing(processes, own={4})] == [(1, "Kvasir"), (3, "Ray")]


def test_a_busy_machine_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_run, "other_processes", lambda: [OtherProcess(7, "Ray", "raylet")])
    with pytest.raises(suite_run.NotIdle, match="Ray, process 7: raylet"):
        suite_run.await_idle(lambda _: None, first=True)


def test_one_that_was_only_busy_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [0.9, 0.01]
    said: list[str] = []
    monkeypatch.setattr(suite_run, "other_processes", list)
    monkeypatch.setattr(suite_run, "busy_share", lambda _: shares.pop(0))
    suite_run.await_idle(said.append, first=False)
    assert said == ["waiting for an idle machine: 90% of the CPUs are in use"]


def bench(folder: Path, code: str) -> None:
    (folder / "bench.py").write_text(code)


def test_a_run_is_judged_by_the_rows_that_it_wrote_and_not_by_its_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "load_tests" / "reports"
    monkeypatch.setattr(report, "REPORTS", folder)
    report.write("some", "make bench-some", WHOLE)
    kept = folder / "some.json"
    text = kept.read_text()
    scenario = replace(SCENARIO, arguments=SEED, needs=("seed",))

    def run() -> str:
        return run_scenario(scenario, {"seed": "5"}, "head", lambda _: None, root=tmp_path).problem

    bench(tmp_path, "import sys; print(sys.argv[1:]); sys.exit(1)")
    assert run() == ""
    assert (tmp_path / "build" / "reports" / "some.log").read_text() == "['--seed', '5']\n"
    for commit in ("near", "head+changes"):
        kept.write_text(text.replace('"commit": "head"', f'"commit": "{commit}"'))
        assert run().startswith("2 of its rows were not measured, as 'a'; see ")


def test_a_run_that_does_not_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench(tmp_path, "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); signal.pause()")
    for name, value in (("_POLL_S", 0.05), ("_TIMES_LONGER", 0), ("_MORE_S", 0.0), ("_STOPPING_S", 1.0)):
        monkeypatch.setattr(suite_run, name, value)
    outcome = run_scenario(SCENARIO, {}, "head", lambda _: None, root=tmp_path)
    assert outcome.problem.startswith("not done in 0 min, and stopped")


def test_the_table_of_states_says_why_a_report_is_stale() -> None:
    lines = state_table([judged(*WHOLE), judged(row("a", "far"))], NOW).splitlines()
    assert [line.split()[:5] for line in lines[1:]] == [
        ["some", "2", "0", "h", "head"],
        ["some", "1", "of", "2", "11"],
    ]
    assert lines[2].endswith("stale: missing: b, speed-up …; changed lines: 11 since far; allowed are 10")


def test_rows_that_miss_their_target_are_listed_with_it() -> None:
    ratio = Row("c", 3.0, "ms", "higher", ratio=0.5, target_ratio=0.9)
    lines = missed_table({"some": [row("a"), row("b", value=2.5), ratio]}).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["some", "b", "2.5", "ms", "≤", "2"],
        ["some", "c", "ratio", "0.5", "≥", "0.9"],
    ]
    assert missed_table({"some": [row("a")]}) == "every row meets its target"


MISSED = {"some": [row("a"), row("b, 1 MiB", value=2.5), row("b, 2 MiB", value=3.0)]}


def test_every_missed_row_needs_one_text_and_every_text_a_missed_row() -> None:
    tried = {"some": {"b, 1 *": "Much.", "b, * MiB": "More.", "a": "Nothing."}, "other": {"*": "Nothing."}}
    assert unexplained(MISSED, tried) == ["some: b, 1 MiB"]
    assert unexplained(MISSED, {}) == ["some: b, 1 MiB", "some: b, 2 MiB"]
    assert not_missed(MISSED, tried) == ["some: a", "other: *"]


def test_the_page_has_the_missed_rows_with_what_was_tried() -> None:
    lines = page(MISSED, {"some": {"b, *": "Much."}}).splitlines()
    assert "2 of 3 rows with a target miss it" in lines[2]
    assert lines[-3:] == ["| b, 2 MiB | 3 ms | ≤ 2 | `head` |", "", "Much."]
    assert "| a |" not in "".join(lines)
