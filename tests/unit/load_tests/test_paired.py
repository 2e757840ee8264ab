"""Benchmarks at two commits are compared row by row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from load_tests import report
from load_tests.report import Row
from load_tests.scenarios import paired
from load_tests.scenarios.paired import Figure, in_order, measure, others, printed, rows_of

QUICK = """\
request, 100 B: 0.4812 CPU s/1k (target 0.2, peer None) 32 connections
chunk, 8 deltas a message: 19.41 CPU µs (target 22.0, peer 13.2) 512 streams
lookup, a block matched: 1.2e-09 ns (target None, peer None)
configuration 1234, 40 s
"""


def test_figures_of_a_quick_run_are_read_from_what_it_prints() -> None:
    assert printed(QUICK) == {
        "request, 100 B": Figure(0.4812, "CPU s/1k", "lower"),
        "chunk, 8 deltas a message": Figure(19.41, "CPU µs", "lower"),
        "lookup, a block matched": Figure(1.2e-09, "ns", "lower"),
    }


def test_a_row_is_the_median_of_the_head_beside_that_of_the_base() -> None:
    base = [{"chunk": Figure(each, "CPU µs", "lower")} for each in (10.0, 20.0, 40.0)]
    head = [{"chunk": Figure(each, "CPU µs", "lower")} for each in (9.0, 22.0, 32.0)]
    (row,) = rows_of("edge", base, head)
    assert (row.name, row.value, row.peer, row.spread) == ("edge: chunk", 22.0, 20.0, (9.0, 32.0))
    assert row.ratio == pytest.approx(0.9)
    assert row.met


def test_a_row_that_only_one_commit_has_is_left_out() -> None:
    base = [{"old": Figure(1.0, "ms", "lower"), "rest": Figure(0.0, "figures", "higher")}]
    head = [{"new": Figure(1.0, "ms", "lower"), "rest": Figure(0.0, "figures", "higher")}]
    assert rows_of("edge", base, head) == []


def test_what_is_measured_in_turn_replaces_those_rows_of_the_gateway_benchmark_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trees = (Path("base"), Path("head"), Path("copy"))
    name = "request, 100 B"

    def costs(of: Sequence[Path], folder: Path, rounds: int) -> dict[Path, list[dict[str, float]]]:
        return {tree: [{name: {"base": 2.0, "head": 1.0, "copy": 1.5}[tree.name]}] * rounds for tree in of}

    def figures(scenario: str, tree: Path) -> dict[str, Figure]:
        return {each: Figure(3.0, "CPU ms", "lower") for each in (name, f"chunk of {scenario}")}

    monkeypatch.setattr(paired, "path_costs", costs)
    monkeypatch.setattr(paired, "figures", figures)
    rows = measure(["edge", "gateway", "routers"], trees, 1)
    assert [row.name for row in rows] == [
        f"routers: {name}",
        "gateway: chunk of gateway",
        f"edge: {name}",
        "edge: chunk of edge",
        f"control: {name}",
    ]
    assert rows[0].unit == "CPU s/1k"
    assert (rows[0].peer, rows[0].value, rows[0].ratio) == (2.0, 1.0, 0.5)
    control = rows[-1]
    assert (control.peer, control.value, control.ratio, control.target_ratio) == (1.0, 1.5, 1.5, None)


def test_a_report_keeps_the_rows_that_were_not_measured_again_and_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "REPORTS", tmp_path)
    first = [Row(f"{scenario}: request", 2.0, "ms", "lower") for scenario in ("routers", "control", "edge")]
    path = report.write("paired", "bench BASE=a", first, "old")
    rows = [Row("edge: request", 1.0, "ms", "lower"), *others(path, "bench BASE=a", ["edge"])]
    report.write("paired", "bench BASE=a", in_order(rows), "new")
    assert [(row.name, row.value, row.run and row.run.commit) for row in report.read(path)] == [
        ("routers: request", 2.0, "old"),
        ("control: request", 2.0, "old"),
        ("edge: request", 1.0, "new"),
    ]
    assert [row.name for row in others(path, "bench BASE=a", ["routers"])] == ["edge: request"]
    assert others(path, "bench BASE=b", ["edge"]) == []
