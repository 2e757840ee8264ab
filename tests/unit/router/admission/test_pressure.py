"""Measurements of the queue, tenants above their share, and actions under pressure."""

from __future__ import annotations

import itertools

import pytest

from kvasir.ports.router import NO_BROWNOUT
from kvasir_router.admission.brownout import Brownout
from kvasir_router.admission.contract import BrownoutRules, BrownoutStep
from kvasir_router.admission.pace import Pace
from kvasir_router.admission.shares import MEMORY_S, Shares

STEPS = (
    BrownoutStep(cap_max_tokens=256),
    BrownoutStep(fallback_model="small"),
    BrownoutStep(cap_max_tokens=64),
    BrownoutStep(shed=2),
)
RULES = BrownoutRules(STEPS, enter=0.5, leave=0.1, enter_s=1.0, leave_s=10.0)


def held(brownout: Brownout, pressure: float, since: float, until: float) -> list[tuple[float, int]]:
    """Look ten times a second; when the level changed, and to what."""
    changes = []
    for tenth in range(round(since * 10), round(until * 10)):
        if brownout.update(pressure, tenth / 10):
            changes.append((tenth / 10, brownout.level))
    return changes


def test_steps_are_entered_and_left_in_order_one_at_a_time() -> None:
    brownout = Brownout(RULES)
    assert held(brownout, 1.0, 0, 10) == [(1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)]
    assert (brownout.cap, brownout.view.fallback_model, brownout.shed) == (64, "small", 2)
    assert brownout.view.text == "4; cap_max_tokens=256; fallback_model=small; cap_max_tokens=64; shed=2"
    assert [level for _, level in held(brownout, 0.0, 10, 60)] == [3, 2, 1, 0]
    assert brownout.view == NO_BROWNOUT


def test_between_the_thresholds_nothing_changes_and_a_moment_is_not_enough() -> None:
    brownout = Brownout(RULES)
    for _ in range(20):
        assert not held(brownout, 1.0, 0, 0.9)
        assert not held(brownout, 0.3, 0.9, 1.0)
    held(brownout, 1.0, 2, 3.5)
    assert not held(brownout, 0.3, 4, 200)
    assert brownout.level == 1


def test_a_step_that_brings_its_load_back_is_kept_longer_each_time() -> None:
    brownout = Brownout(BrownoutRules(STEPS[:1], enter=0.5, leave=0.1, enter_s=1.0, leave_s=10.0))
    now, entered = 0.0, []
    while now < 1000:
        # The load is too much but for the step.
        if brownout.update(0.0 if brownout.level else 1.0, now) and brownout.level:
            entered.append(now)
        now += 0.1
    gaps = [later - earlier for earlier, later in itertools.pairwise(entered)]
    assert gaps[0] == pytest.approx(11.2, abs=0.5)
    assert all(later > earlier - 0.2 for earlier, later in itertools.pairwise(gaps))
    assert gaps[-1] == pytest.approx(161, abs=2)


def test_it_says_when_it_will_change_by_itself() -> None:
    brownout = Brownout(RULES)
    assert brownout.next_due() is None
    brownout.update(1.0, 5.0)
    assert brownout.next_due() == 6.0
    assert brownout.update(1.0, 6.0)


def test_the_pace_is_what_began_while_others_waited() -> None:
    pace = Pace()
    pace.began(1000, 0.0)
    assert pace.rate(1.0) is None
    pace.waited(10.0)
    for tenth in range(1, 31):
        pace.began(100, 10.0 + tenth / 10)
    pace.queue_empty(13.0)
    assert pace.rate(20.0) == pytest.approx(1000, rel=0.1)
    assert pace.wait_s(5000, 20.0) == pytest.approx(5, rel=0.1)


def test_a_pace_from_when_workers_hung_is_forgotten_when_nobody_has_waited_for_a_while() -> None:
    pace = Pace()
    pace.waited(0.0)
    pace.began(10, 5.0)
    pace.queue_empty(6.0)
    assert pace.wait_s(1000, 7.0) is not None
    assert pace.wait_s(1000, 20.0) is None
    pace.waited(20.0)
    assert pace.wait_s(1000, 20.05) is None
    pace.began(1000, 20.2)
    assert pace.rate(20.2) == pytest.approx(5000, rel=0.1)


def test_places_that_come_are_reckoned_with_before_they_are_measured() -> None:
    pace = Pace()
    assert pace.rate(0.0) is None
    pace.waited(0.0)
    pace.began(500, 0.5)
    pace.resized(2.0)
    assert pace.rate(0.6) == pytest.approx(2000)


def test_places_that_go_turn_nobody_away_until_that_is_measured() -> None:
    pace = Pace()
    pace.waited(0.0)
    pace.began(500, 0.5)
    pace.resized(0.5)
    assert pace.rate(0.6) == pytest.approx(1000)
    pace.began(250, 1.0)
    assert pace.rate(1.1) == pytest.approx(500)


@pytest.mark.parametrize("measured", [True, False])
def test_places_that_come_and_go_all_the_time_make_the_pace_no_better(measured: bool) -> None:
    pace = Pace()
    pace.waited(0.0)
    pace.began(500, 0.5)
    for turn in range(1, 20):
        pace.resized(0.5)
        if measured:
            pace.began(250, 0.5 + turn / 2)
        pace.resized(2.0)
        rate = pace.rate(0.5 + turn / 2)
        assert rate is not None
        assert rate <= 1000 * (1 + 1e-9)


def test_a_queue_that_stands_still_gets_slower_by_the_second() -> None:
    pace = Pace()
    pace.waited(0.0)
    for tenth in range(1, 21):
        pace.began(100, tenth / 10)
    before = pace.rate(2.0)
    after = pace.rate(12.0)
    assert before is not None
    assert after is not None
    assert after < before / 10


def nobody(_: str) -> int:
    return 0


def test_only_among_several_is_anybody_above_its_share() -> None:
    shares = Shares(nobody)
    shares.seen(0, "greedy", 1.0, 0.0)
    shares.hold(0, "greedy", 100)
    assert not shares.over(0, "greedy")
    shares.seen(0, "other", 1.0, 1.0)
    assert shares.over(0, "greedy")
    assert not shares.over(0, "other")
    shares.hold(0, "other", 100)
    assert not shares.over(0, "greedy")
    shares.release(0, "other", 100)
    assert shares.over(0, "greedy")


def test_a_class_keeps_something_for_a_more_urgent_one() -> None:
    shares = Shares(nobody)
    shares.seen(1, "batch", 1.0, 0.0)
    assert not shares.over(1, "batch")
    shares.seen(0, "urgent", 1.0, 0.0)
    shares.hold(0, "urgent", 100)
    assert shares.over(1, "batch")
    assert not shares.over(0, "urgent")
    shares.release(0, "urgent", 100)
    shares.seen(1, "batch", 1.0, MEMORY_S + 1)
    assert not shares.over(1, "batch")


def test_weights_make_shares() -> None:
    shares = Shares(nobody)
    shares.seen(0, "gold", 3.0, 0.0)
    shares.seen(0, "iron", 1.0, 0.0)
    shares.hold(0, "gold", 70)
    shares.hold(0, "iron", 30)
    assert not shares.over(0, "gold")
    assert shares.over(0, "iron")


def test_who_wants_nothing_is_forgotten_but_not_while_something_runs() -> None:
    shares = Shares(nobody)
    shares.seen(0, "busy", 1.0, 0.0)
    shares.hold(0, "busy", 1)
    shares.seen(0, "gone", 1.0, 0.0)
    shares.seen(0, "new", 1.0, MEMORY_S + 1)
    assert set(shares.weights()) == {"busy", "new"}
    shares.release(0, "busy", 1)
    assert shares.running == 0


def test_who_waits_is_not_forgotten() -> None:
    waiting = {"patient": 1}
    shares = Shares(lambda tenant: waiting.get(tenant, 0))
    shares.seen(0, "patient", 1.0, 0.0)
    shares.seen(0, "new", 1.0, MEMORY_S + 1)
    assert set(shares.weights()) == {"patient", "new"}
    waiting.clear()
    shares.seen(0, "new", 1.0, MEMORY_S + 3)
    assert set(shares.weights()) == {"new"}
