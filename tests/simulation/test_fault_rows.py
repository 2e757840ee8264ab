"""Faults that must be survived, in virtual time. Each row proves that its fault happened."""

from __future__ import annotations

import pytest

from kvasir_platform.sim.chaos.rows import row_11, row_12_stale, row_12_unhealthy, row_14
from kvasir_platform.sim.chaos.rows_workers import HANDOFF_STATES, row_1, row_2, row_4, row_5, row_6, row_13

SEED = 1


def test_a_killed_decode_worker_costs_its_streams_a_pause_and_no_token() -> None:
    lost = row_1(SEED, streams=24)
    assert lost.on_it > 0
    assert lost.migrations == lost.on_it
    assert (lost.ended, lost.wrong) == ({"ok": 24}, ())
    assert lost.max_gap_s <= 2.0


def test_a_prefill_worker_may_be_killed_at_every_state_of_the_hand_over() -> None:
    lost = row_2()
    assert all(lost.kills[state] for state in HANDOFF_STATES)
    assert lost.wrong == ()
    assert lost.max_rest_s <= 5.0


def test_a_frozen_worker_is_given_nothing_after_two_seconds_and_its_streams_go_on() -> None:
    lost = row_4(SEED, streams=24)
    assert lost.on_it > 0
    assert 0.5 < lost.out_s <= 2.0
    assert (lost.ended, lost.wrong) == ({"ok": 24}, ())


def test_a_partitioned_worker_leaves_within_three_seconds_and_is_exact_again_within_five() -> None:
    lost = row_5(SEED, streams=24)
    assert lost.on_it > 0
    assert 0.5 < lost.out_s <= 3.0
    assert lost.exact_s <= 5.0
    assert (lost.ended, lost.wrong) == ({"ok": 24}, ())


def test_a_killed_router_cuts_its_own_streams_only() -> None:
    lost = row_6(SEED, streams=20)
    assert lost.cut == lost.own == 20
    assert (lost.others_ended, lost.wrong) == ({"ok": 20}, ())
    assert lost.exact_s <= 5.0


def test_rolling_restarts_under_load_fail_no_request() -> None:
    rolled = row_13(SEED, restarts=3)
    assert rolled.lives == rolled.restarts == 3
    assert rolled.migrations > 0
    assert (rolled.ended, rolled.refused, rolled.wrong) == ({"ok": rolled.requests}, {}, ())


@pytest.mark.parametrize("code", ["worker_overloaded", "worker_failed"])
def test_workers_that_all_refuse_are_not_asked_again_and_again(code: str) -> None:
    storm = row_11(SEED, code=code)
    assert storm.served_during == 0
    assert storm.amplification <= 1.2
    assert storm.served_after == storm.requests_after


def test_when_most_workers_fail_the_others_serve_what_they_can() -> None:
    remainder = row_12_unhealthy(SEED)
    assert remainder.refusals > 0
    assert remainder.panicked
    assert remainder.goodput >= remainder.fair


def test_loads_that_are_not_reported_any_more_cost_no_request() -> None:
    stale = row_12_stale(SEED)
    assert stale.ended == {"ok": stale.requests}
    assert stale.max_over_mean < 1.5


def test_a_cold_worker_joins_without_the_fleet_noticing() -> None:
    joined = row_14(SEED, seconds=10.0)
    assert joined.last_share > joined.first_share
    assert joined.ratio <= 1.2
