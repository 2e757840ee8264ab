"""Rows of the scorecard at a small size, with real processes, as regression tests."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from load_tests.report import Row, Run
from load_tests.scenarios.scorecard import run as scorecard
from load_tests.scenarios.scorecard.clients import row15
from load_tests.scenarios.scorecard.common import Figure, Trial
from load_tests.scenarios.scorecard.fleet import fair_shares, row10, row24
from load_tests.scenarios.scorecard.tiers import row08, row09
from load_tests.scenarios.scorecard.workers import row01, row02, row03, row04, row05, row07
from tests.kit.lab import netns, small_disk
from tests.kit.programs import program


def assert_met(figures: list[Figure]) -> None:
    """Nothing is lost, repeated, wrong or left over; what took how long is the scorecard's own business."""
    figures = [figure for figure in figures if figure.unit not in ("s", "ms", "%")]
    rows = scorecard.report_rows(scorecard.Result(1, tuple(figures)), 1)
    missed = [f"{row.name}: {row.value} {row.unit}; {row.note}" for row in rows if row.met is False]
    assert not missed, "\n".join(missed)
    assert any(row.met for row in rows)


@pytest.mark.slow
async def test_streams_outlive_killed_decode_workers(tmp_path: Path) -> None:
    size = row01.Size(decode=3, prefill=1, kills=2, streams=20, tokens=60, real=False)
    assert_met(await row01.measure(Trial(tmp_path, 11, quiet=True), size))


@pytest.mark.slow
async def test_prompts_outlive_killed_prefill_workers(tmp_path: Path) -> None:
    size = row02.Size(prefill=2, decode=2, rounds=1, streams=8, tokens=20, real=False)
    assert_met(await row02.measure(Trial(tmp_path, 12, quiet=True), size))


@pytest.mark.slow
@pytest.mark.soak
async def test_tokens_are_right_when_their_kv_stalls_or_arrives_with_a_wrong_bit(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    size = row03.Size(kinds=("nccl",), rounds=1, words=600)
    assert_met(await row03.measure(Trial(tmp_path, 16, quiet=True), size))


@pytest.mark.slow
@pytest.mark.parametrize("tier", [pytest.param("disk", marks=pytest.mark.soak), "Redis"])
async def test_requests_do_without_a_tier_in_trouble(tier: str, tmp_path: Path, soak: bool) -> None:
    pytest.importorskip("vllm")
    if tier == "disk" and (reason := small_disk.available()) is not None:
        pytest.skip(reason)
    # What is tried is whether it is told and used again, and not whether a loaded machine is quick.
    size = row08.Size(
        tiers=(tier,), requests=20, words=150, every_s=0.15, checked=2, hits=0, lookup_timeout_s=0.2
    )
    if not soak:
        size = replace(size, faults=("killed", "slow"))
    assert_met(await row08.measure(Trial(tmp_path, 17, quiet=True), size))


@pytest.mark.slow
@pytest.mark.soak
async def test_what_was_tampered_with_in_a_tier_is_a_miss(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    assert_met(await row09.measure(Trial(tmp_path, 18, quiet=True), row09.Size(rounds=1, words=120)))


@pytest.mark.slow
async def test_what_is_too_much_is_refused_and_the_rest_is_served(tmp_path: Path) -> None:
    size = row10.Size(capacity_asks=60, window_s=4.0, near=(1.0,), above=(5.0,), shares=None)
    assert_met(await row10.measure(Trial(tmp_path, 19, quiet=True), size))


@pytest.mark.slow
@pytest.mark.soak
async def test_a_greedy_tenant_is_refused_and_the_other_one_is_not(tmp_path: Path) -> None:
    size = fair_shares.Size(prefill=4, decode=1, slower=4.0, long_tokens=20_000, long_prompts=2, window_s=6.0)
    assert_met(await fair_shares.measure(Trial(tmp_path, 20, quiet=True), size))


@pytest.mark.slow
async def test_a_frozen_worker_is_left_alone(tmp_path: Path) -> None:
    size = row04.Size(decode=4, prefill=1, rate=12.0, before_s=2.0, frozen_s=4.0)
    assert_met(await row04.measure(Trial(tmp_path, 13, quiet=True), size))


@pytest.mark.slow
async def test_a_partitioned_worker_comes_back_exact(tmp_path: Path) -> None:
    program("ip")
    if (missing := netns.available()) is not None:
        pytest.skip(missing)
    size = row05.Size(decode=2, prefill=1, rate=8.0, before_s=2.0, partition_s=4.0)
    assert_met(await row05.measure(Trial(tmp_path, 14, quiet=True), size))


async def test_an_index_knows_what_workers_hold_whatever_becomes_of_its_events(tmp_path: Path) -> None:
    assert_met(await row07.measure(Trial(tmp_path, 21, quiet=True), row07.Size(histories=200)))


@pytest.mark.slow
async def test_clients_that_leave_leave_nothing_behind(tmp_path: Path) -> None:
    size = row15.Size(decode=2, prefill=1, disconnects=200)
    assert_met(await row15.measure(Trial(tmp_path, 22, quiet=True), size))


@pytest.mark.slow
async def test_descriptors_and_tasks_do_not_grow_with_requests(tmp_path: Path) -> None:
    size = row24.Size(prefill=1, decode=2, first=2, periods=3, period_s=4.0)
    figures = await row24.measure(Trial(tmp_path, 23, quiet=True), size)
    assert_met([figure for figure in figures if figure.unit == "streams"])
    # Slopes are of minutes; in a few periods, one connection more or less is one.
    gained = {figure.what: figure.value for figure in figures if figure.unit in ("descriptors", "tasks")}
    assert max(gained.values()) < 3.0, gained


async def test_a_row_that_fails_is_a_row_that_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_trial: Trial) -> list[Figure]:
        raise RuntimeError("the wheels came off")

    monkeypatch.setattr(row01, "measure", broken)
    (row,) = scorecard.report_rows(await scorecard.measure(1, 7), 7)
    assert row.met is False
    assert "the wheels came off" in row.note
    assert row.seeds == (7,)


def test_a_report_keeps_the_rows_that_were_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "scorecard.json"
    old = [
        {
            "name": f"row {number}: x",
            "value": 1.0,
            "unit": "s",
            "better": "lower",
            "target": 2.0,
            "seeds": [5],
            "run": 0,
        }
        for number in (1, 2, 13)
    ]
    run = Run("c", "2026-01-01", "a machine", "a command")
    path.write_text(json.dumps({"runs": [asdict(run)], "rows": old}))
    kept = scorecard.kept(path, [2])
    assert [row.name for row in kept] == ["row 1: x", "row 13: x"]
    assert kept[0] == Row("row 1: x", 1.0, "s", "lower", target=2.0, seeds=(5,), run=run)
    assert scorecard.kept(tmp_path / "none.json", []) == []
