"""How the bench of models judges what engines generated."""

from __future__ import annotations

import io
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from load_tests.report import REPORTS, Run, checkout, read
from load_tests.scenarios.frameworks.suites import ROOT
from load_tests.scenarios.frameworks.table import PAGE as FRAMEWORKS_PAGE
from load_tests.scenarios.models.engines import LENGTHS, Generated
from load_tests.scenarios.models.kept import MeasuredCell, all_cells, keep, to_rows
from load_tests.scenarios.models.results import Cell, Verdict, equal_tokens, moved, served_again, together
from load_tests.scenarios.models.served import failure_of
from load_tests.scenarios.models.table import PAGE

from kvasir.config.load.loader import load
from kvasir.core.errors import StartError
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.common.progress import ProgressDisplay, explain
from kvasir_platform.cluster.local.supervisor import StartProgress

PROMPTS = len(LENGTHS)
OLDER, OLD, NEW = (Run(commit, "2026-01-02", "a machine", "python -m models") for commit in ("a", "b", "c"))
PLAIN = Generated(
    tokens=[[1, 2]] * PROMPTS,
    logprobs=[[{1: -0.5}, {2: -0.25}]] * PROMPTS,
    again=[[1, 2]] * PROMPTS,
    cached=[32] * PROMPTS,
    moved=[32] * PROMPTS,
)


def test_equal_tokens_are_a_yes() -> None:
    assert equal_tokens(PLAIN, PLAIN) == Cell("yes")


def test_other_tokens_come_with_how_many_and_how_far_they_are_apart() -> None:
    other = replace(
        PLAIN,
        tokens=[[1, 3], *PLAIN.tokens[1:]],
        logprobs=[[{1: -0.5}, {2: -0.5, 3: -0.375}], *PLAIN.logprobs[1:]],
    )
    cell = equal_tokens(PLAIN, other)
    assert cell.verdict == "partly"
    assert cell.note.startswith(f"{PROMPTS - 1} of {PROMPTS} prompts have equal tokens")
    assert cell.note.endswith("within 0.25")


def test_a_prompt_that_is_not_found_again_is_named() -> None:
    missed = replace(PLAIN, cached=[0, *PLAIN.cached[1:]])
    assert served_again(PLAIN, missed, Cell("yes"), 32) == Cell(
        "partly", f"no prefix hit for prompts of {LENGTHS[0]} tokens"
    )


def test_a_prompt_without_a_whole_block_is_not_expected_in_a_cache() -> None:
    missed = replace(PLAIN, cached=[0, 0, *PLAIN.cached[2:]])
    assert served_again(PLAIN, missed, Cell("yes"), LENGTHS[1]) == Cell("yes")
    assert served_again(PLAIN, missed, Cell("yes"), LENGTHS[0]).verdict == "partly"


def test_a_prompt_that_did_not_move_is_named() -> None:
    still = replace(PLAIN, moved=[*PLAIN.moved[:-1], 0])
    assert str(LENGTHS[-1]) in moved(still, Cell("yes"), "the tier").note


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [(("yes", "yes"), "yes"), (("yes", "partly"), "partly"), (("partly", "no", "yes"), "no")],
)
def test_the_worst_of_several_counts(verdicts: tuple[Verdict, ...], worst: Verdict) -> None:
    assert together([Cell(verdict) for verdict in verdicts]).verdict == worst


def test_models_that_are_not_run_keep_their_cells_and_runs_in_a_fresh_checkout(tmp_path: Path) -> None:
    report = to_rows(
        [
            MeasuredCell("llama", "aggregated", Cell("yes"), OLD),
            MeasuredCell("llama", "tools", Cell("no", "400: no template"), OLD),
            MeasuredCell("gpt2", "tiers", Cell("partly", "nothing came: from the tier"), OLDER),
        ]
    )
    keep(tmp_path, "qwen2", "engines", {"aggregated": Cell("not moved", "why")}, NEW)
    qwen2 = MeasuredCell("qwen2", "aggregated", Cell("not moved", "why"), NEW)
    found = all_cells(tmp_path, report)
    assert found == [
        MeasuredCell("llama", "aggregated", Cell("yes"), OLD),
        MeasuredCell("llama", "tools", Cell("no", "400: no template"), OLD),
        qwen2,
        MeasuredCell("gpt2", "tiers", Cell("partly", "nothing came: from the tier"), OLDER),
    ]
    assert all_cells(tmp_path / "removed", to_rows(found)) == found


def test_a_part_that_is_run_again_replaces_its_cells_and_no_others(tmp_path: Path) -> None:
    report = to_rows([MeasuredCell("llama", column, Cell("yes"), OLD) for column in ("tiers", "tools")])
    keep(tmp_path, "llama", "engines", {"plain vLLM": Cell("no", "no kernel")}, NEW)
    assert all_cells(tmp_path, report) == [
        MeasuredCell("llama", "plain vLLM", Cell("no", "no kernel"), NEW),
        MeasuredCell("llama", "tools", Cell("yes"), OLD),
    ]


def test_the_committed_report_has_the_cells_of_the_committed_page() -> None:
    kept = all_cells(Path("nowhere"), read(REPORTS / "models.json"))
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    stated = sum(cell.strip() in get_args(Verdict) for row in rows for cell in row.split("|"))
    assert len(kept) == stated


def test_what_a_benchmark_has_written_does_not_change_the_commit_that_it_measures(tmp_path: Path) -> None:
    pages = (REPORTS / "models.json", PAGE, FRAMEWORKS_PAGE)
    written = [tmp_path / page.relative_to(ROOT) for page in pages]
    code = tmp_path / "code.py"
    for path in (*written, code):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    author = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    for command in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "first")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    commit = checkout(tmp_path)
    assert len(commit) >= 7
    for path in written:
        path.write_text("2")
    assert checkout(tmp_path) == commit
    code.write_text("2")
    assert checkout(tmp_path) == f"{commit}+changes"


def test_the_reason_of_a_failed_start_is_kept_and_not_what_followed_it() -> None:
    out = io.StringIO()
    output = CommandOutput(json=True, out=out)
    display = ProgressDisplay(load(None, []), output, Path("logs"), lambda: 1.0)
    error = StartError("pool serve does not start: no kernel", remedy="take another model", is_root=True)
    for event, text in (("step", "2 to load"), ("failed", error.message), ("stopping", "after the failure")):
        display.show(StartProgress(event, text=text))
    display.show(StartProgress("stopped"))
    printed = [json.loads(line) for line in out.getvalue().splitlines()]
    assert failure_of(printed) == error.message
    explain(error, output)
    printed = [json.loads(line) for line in out.getvalue().splitlines()]
    assert failure_of(printed) == f"{error.message}; take another model"
    assert failure_of([]) == ""
