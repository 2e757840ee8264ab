"""The bench of regions: its cells compute what their traffic needs, and its outages lose nothing unseen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from load_tests.scenarios.regions.day import RegionDay
from load_tests.scenarios.regions.results import DayFigures, figures_of
from load_tests.scenarios.regions.rows import rows_of
from load_tests.scenarios.regions.selection import NEAREST, OURS, ROUND_ROBIN, SELECTIONS
from load_tests.scenarios.regions.world import Outage, World, replica_times, traffic_of

MINUTES = 6 * 60.0
QUIET = World(MINUTES, ())
BROKEN = World(
    MINUTES,
    (Outage(frozenset((3,)), 120.0, 240.0, lost=True), Outage(frozenset((4,)), 150.0, 270.0)),
)


def run(world: World, name: str) -> RegionDay:
    return RegionDay(world, traffic_of(world, 1), SELECTIONS[name]()).run()


@pytest.fixture(scope="module")
def broken() -> RegionDay:
    return run(BROKEN, ROUND_ROBIN)


def test_every_request_ends_with_its_whole_output() -> None:
    day = run(QUIET, NEAREST)
    assert {work.outcome for work in day.works} <= {"ok", "limited"}
    assert len(day.works) == len(day.traffic) > 500
    times = replica_times()
    for work in (each for each in day.works if each.outcome == "ok"):
        assert work.first_s - work.at_s >= work.prefill_s
        assert work.ended_s - work.first_s >= (work.output - 2) * times.fixed_s
    found = figures_of(day)
    assert (found.cross, found.failed, found.repeated) == (0.0, 0, 0)
    assert found.dollars > 0


def test_a_run_is_repeated_exactly() -> None:
    assert figures_of(run(QUIET, OURS)) == figures_of(run(QUIET, OURS))


def test_outages_repeat_what_was_cut_off_and_lose_only_clients_of_the_lost_region(broken: RegionDay) -> None:
    found = figures_of(broken)
    assert found.repeated > 0
    assert (found.doubles, found.violations) == (0, 0)
    lost = [work for work in broken.works if work.outcome not in ("ok", "limited")]
    assert {work.outcome for work in lost} <= {"broken"}
    assert {work.entry for work in lost} <= {3}


def test_overlapping_executions_are_counted(broken: RegionDay) -> None:
    day = RegionDay(QUIET, broken.traffic, SELECTIONS[NEAREST]())
    day._until(10.0)
    work = next(work for work in day.works if work.number in day._running)
    day._deliver(work, work.gate, day.cells[work.gate], 10.0)
    assert day.counts.doubles == 1


def test_the_shared_limit_stays_within_its_bound(broken: RegionDay) -> None:
    assert figures_of(broken).excess <= 0
    assert figures_of(broken).worst_hour <= figures_of(broken).alone_hour


def test_rows_compare_ours_with_the_best_of_the_others() -> None:
    day = DayFigures(
        100.0, 1000, 1.0, 2.0, 3.0, 0.5, 0.99, 1, 0.1, 0, 0, 5, 1, 0.9, 2.0, -5.0, (1, 2, 3, 4, 5)
    )
    peers = {NEAREST: replace(day, dollars=120.0, p99_s=4.0), ROUND_ROBIN: replace(day, p99_s=2.5, met=0.5)}
    rows = {row.name: row for row in rows_of({OURS: replace(day, dollars=90.0), **peers}, 7)}
    cost = rows[f"cost of a day, {OURS}"]
    assert (cost.value, cost.peer, cost.ratio, cost.met, cost.seeds) == (90.0, 100.0, 0.9, True, (7,))
    assert rows[f"TTFT p99, {OURS}"].peer == 2.5
    assert rows["requests executed in two regions at a time"].met
    assert rows["shared limit, the worst minute beyond its bound"].value == 0.0
