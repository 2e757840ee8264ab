"""The autoscaling bench: it runs, and its figures of rivals are correct."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from load_tests.report import Row
from load_tests.scenarios.autoscale import days, rivals, run
from load_tests.scenarios.autoscale.days import Case, Outcome, Setting, shapes_of
from load_tests.scenarios.autoscale.rivals import Trials, sweep
from load_tests.scenarios.autoscale.rows import rows_of

from kvasir.core.requests import Role
from kvasir_platform.sim.scaling.days import RequestShape
from kvasir_platform.sim.scaling.fleet import Kind, ScaledFleet, SimSlo
from kvasir_platform.sim.scaling.rivals import HeldMaximum, Hpa, Queue, Static, Ttft, play
from kvasir_platform.workload.files import read_mooncake

KIND = Kind(0.01, 1e-4, 0.0, 0.01, 1e-4, 0.0, 100_000, 16, start_s=30.0)
LEVEL = SimSlo(5.0, 0.1)
POOLS = {"prefill": (Role.PREFILL, 20), "decode": (Role.DECODE, 20)}


def trace(path: Path, requests: int = 200) -> Path:
    """Prompts of some thousand tokens of which each shares a block or two with those before."""
    rng = Random(1)
    with path.open("w") as lines:
        for i in range(requests):
            length = rng.randrange(1000, 12000)
            names = [0, i % 7, *(1000 * i + block for block in range(2, -(-length // 512)))]
            row = {
                "timestamp": 3000 * (i // 10),
                "input_length": length,
                "output_length": rng.randrange(5, 50),
            }
            lines.write(json.dumps(row | {"hash_ids": names}) + "\n")
    return path


def fleet(rate: float, seconds: float, sizes: tuple[int, int] = (4, 4)) -> ScaledFleet:
    """Requests at even times; each takes 0.5 s to compute and 1 s or more to decode."""
    count = int(rate * seconds)
    pools = {"prefill": (Role.PREFILL, sizes[0]), "decode": (Role.DECODE, sizes[1])}
    return ScaledFleet(
        KIND, LEVEL, pools, [i / rate for i in range(count)], [RequestShape(5000, 4900, 100)] * count
    )


def outcome(kept: float, hours: float, starts: int = 7) -> Outcome:
    return Outcome("a setting", kept, hours, most=50, starts=starts)


def named(rows: list[Row], name: str) -> Row:
    return next(row for row in rows if row.name == name)


def test_shapes_have_what_an_endless_cache_leaves(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(1100, [1, 2, 3]), (1100, [1, 2, 4]), (1024, [1, 2]), (600, [9, 8])]
    path.write_text(
        "".join(
            json.dumps({"timestamp": 0, "input_length": length, "output_length": 5, "hash_ids": ids}) + "\n"
            for length, ids in rows
        )
    )
    read = read_mooncake(path, Random(0))
    assert shapes_of(read) == [
        RequestShape(1100, 1100, 5),
        RequestShape(1100, 76, 5),
        RequestShape(1024, 512, 5),
        RequestShape(600, 600, 5),
    ]
    assert sum(each.prompt - each.computed for each in shapes_of(read)) == read.infinite_hits()


def test_quick_mode_plays_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise AssertionError("a quick run writes no report")

    monkeypatch.setattr(run, "write", refuse)
    monkeypatch.setattr(run, "QUICK_S", 600.0)
    path = trace(tmp_path / "trace.jsonl")
    rows = run.main([str(path), "--quick", "--days", "wave", "--rivals", "hpa,static"])
    mine = named(rows, "GPU-hours, wave, ours")
    assert mine.value > 0
    assert mine.seeds == (days.SEEDS[0],)
    assert {row.name for row in rows} >= {"GPU-hours, wave, hpa", "GPU-hours, wave, static"}
    assert named(rows, "most workers alive, wave, ours").value <= 100


def test_what_rivals_came_to_is_taken_from_the_file_and_ours_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "QUICK_S", 300.0)
    path, keep = trace(tmp_path / "trace.jsonl"), tmp_path / "kept.jsonl"
    asked = [str(path), "--quick", "--days", "wave", "--rivals", "static", "--keep", str(keep)]
    first = named(run.main(asked), "GPU-hours, wave, static")
    (line,) = keep.read_text().splitlines()
    keep.write_text(json.dumps(json.loads(line) | {"hours": 1234.0}) + "\n")
    assert first.value != 1234.0
    assert named(run.main(asked), "GPU-hours, wave, static").value == 1234.0
    assert len(keep.read_text().splitlines()) == 1
    trace(path, requests=201)
    assert named(run.main(asked), "GPU-hours, wave, static").value != 1234.0


def test_the_best_rival_that_keeps_the_level_is_the_peer() -> None:
    rows = rows_of(
        "wave",
        {
            "ours": {2: outcome(0.995, 90.0), 3: outcome(0.985, 110.0), 4: outcome(0.999, 100.0)},
            "hpa": {seed: outcome(0.991, 125.0) for seed in (2, 3, 4)},
            "static": {seed: outcome(0.999, 200.0) for seed in (2, 3, 4)},
            "queue": {2: outcome(0.991, 50.0), 3: outcome(0.942, 50.0), 4: outcome(0.991, 50.0)},
        },
    )
    mine = named(rows, "GPU-hours, wave, ours")
    assert (mine.value, mine.peer, mine.ratio, mine.met) == (100.0, 125.0, 0.8, True)
    assert mine.spread == (90.0, 110.0)
    assert "the best rival is hpa" in mine.note
    assert named(rows, "GPU-hours, wave, static").ratio == 2.0
    kept = named(rows, "SLO kept, wave, ours")
    assert (kept.value, kept.met) == (98.5, False)


def test_starts_are_compared_with_those_of_hpa() -> None:
    mine = {2: outcome(0.995, 90.0, 300), 3: outcome(0.995, 104.0, 500), 4: outcome(0.995, 95.0, 100)}
    found = {"ours": mine, "hpa": {seed: outcome(0.991, 100.0, 200) for seed in mine}}
    row = named(rows_of("wave", found), "starts a day, wave, ours")
    assert (row.value, row.peer, row.ratio, row.met) == (300, 200, 1.5, True)
    assert "ours are 0.90 to 1.04 of its hours" in row.note
    alone = named(rows_of("wave", {"ours": mine}), "starts a day, wave, ours")
    assert (alone.value, alone.ratio, alone.met) == (300, None, None)


def test_a_rival_that_misses_the_level_is_named_so() -> None:
    found = {"ours": {2: outcome(0.995, 90.0)}, "ttft": {2: outcome(0.942, 50.0)}}
    rows = rows_of("bursts", found)
    missed = named(rows, "GPU-hours, bursts, ttft")
    assert missed.ratio is None
    assert missed.peer is None
    assert "no setting keeps 99 % with seed 2 (the best there 94.20 %): no peer" in missed.note
    assert named(rows, "GPU-hours, bursts, ours").peer is None


def test_trials_of_a_rival_without_a_good_setting_end_with_its_best(tmp_path: Path) -> None:
    trials = Trials(Case(trace(tmp_path / "trace.jsonl"), "wave", 1, 300.0))
    small, smaller = Setting("static", 2, 2), Setting("static", 1, 2)
    assert trials.verdict(small) == trials.verdict(smaller) == "missed"
    assert trials.best is None
    found = trials.result()
    assert found.setting == "2 + 2"
    assert not found.good


def test_trials_cut_short_what_costs_more_than_the_best(tmp_path: Path) -> None:
    trials = Trials(Case(trace(tmp_path / "trace.jsonl"), "wave", 1, 300.0))
    assert trials.verdict(Setting("static", 20, 4)) == "kept"
    assert trials.verdict(Setting("static", 40, 4)) == "dear"
    assert trials.result().setting == "20 + 4"
    assert trials.runs == 2


def test_a_sweep_goes_on_between_the_boldest_that_keeps_and_the_next(tmp_path: Path) -> None:
    class Told(Trials):
        def verdict(self, setting: Setting) -> str:
            self.runs += 1
            return "kept" if setting.prefill <= 0.66 else "missed"

    trials = Told(Case(tmp_path, "wave", 1))
    found = sweep(trials, (0.5, 0.6, 0.7, 0.8), lambda target: Setting("hpa", target, 0.7))
    assert found == pytest.approx(0.648, abs=0.001)
    assert trials.runs == 2 + rivals.REFINE
    assert sweep(trials, (0.7, 0.8), lambda target: Setting("hpa", target, 0.7)) is None


def test_held_begins_with_what_is_there() -> None:
    held = HeldMaximum(60.0)
    assert held.hold(2, 10, 0.0) == 10
    assert held.hold(3, 10, 60.0) == 10
    assert held.hold(3, 10, 61.0) == 3


@pytest.mark.parametrize(
    "rule",
    [
        Hpa({Role.PREFILL: 0.6, Role.DECODE: 0.6}, 60.0),
        Queue({Role.PREFILL: 1.0, Role.DECODE: 10.0}, 60.0),
        Ttft(LEVEL.ttft_s, (0.15, 0.5), 0.6, 60.0),
    ],
)
def test_rules_grow_a_pool_that_is_too_small(
    rule: Hpa | Queue | Ttft,
) -> None:
    # Eight a second at half a second each take four or more replicas; two are there.
    grown = play(fleet(8.0, 900.0, (2, 2)), rule, POOLS, 900.0)
    assert len(grown.serving("prefill")) > 2
    assert grown.most > 5
    assert grown.judged > 0.95 * 8.0 * 900.0


@pytest.mark.parametrize(
    "rule",
    [
        Hpa({Role.PREFILL: 0.6, Role.DECODE: 0.6}, 60.0),
        Queue({Role.PREFILL: 1.0, Role.DECODE: 10.0}, 60.0),
        Ttft(LEVEL.ttft_s, (0.15, 0.5), 0.6, 60.0),
    ],
)
def test_rules_shrink_a_pool_that_is_too_large(rule: Hpa | Queue | Ttft) -> None:
    shrunk = play(fleet(2.0, 1800.0, (12, 2)), rule, POOLS, 1800.0)
    assert 1 <= len(shrunk.serving("prefill")) <= 4
    assert shrunk.met == shrunk.judged


def test_static_stays() -> None:
    stays = play(fleet(8.0, 300.0), Static({"prefill": 4, "decode": 4}), POOLS, 300.0)
    assert (stays.starts, stays.most) == (0, 8)
    assert stays.paid_s == 8 * 300.0
