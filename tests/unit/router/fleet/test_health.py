"""When a worker is ejected, for how long, how it returns, and when ejection is disabled."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvasir.config.spec.deployment import HealthSpec
from kvasir.ports.router import HEALTH_STATES, HealthView
from kvasir_router.fleet.health import BLIP_S, BREAK_S, NOBODY, OVERLOADED, FleetHealth
from kvasir_router.fleet.health_records import HealthLevel

SPEC = HealthSpec(
    consecutive_failures=3,
    slow_ratio=8.0,
    ejection_s=2.0,
    max_ejection_s=16.0,
    max_ejected=0.5,
    slow_start_s=10.0,
    max_legs=40,
)
FAILED = "worker_failed"


def health_of(workers: Iterable[str], spec: HealthSpec = SPEC, at: float = 0.0) -> FleetHealth:
    health = FleetHealth(spec)
    for worker_id in workers:
        health.join(worker_id, "pool", at)
    return health


def fail(health: FleetHealth, worker_id: str, now: float, times: int = SPEC.consecutive_failures) -> None:
    for _ in range(times):
        health.failed(worker_id, FAILED, now)


def states(health: FleetHealth, now: float, workers: str) -> list[str]:
    return [health.view(worker_id, now).state for worker_id in workers]


@pytest.fixture
def four() -> FleetHealth:
    return health_of("abcd")


def test_every_standing_has_a_name_that_status_knows() -> None:
    assert set(HEALTH_STATES) == set(HealthLevel)


# -- failures --------------------------------------------------------------------------------------


def test_failures_in_a_row_eject(four: FleetHealth) -> None:
    fail(four, "a", 1.0, times=2)
    assert four.avoided(1.0) is NOBODY
    fail(four, "a", 1.0, times=1)
    assert four.avoided(1.0) == {"a"}
    view = four.view("a", 1.5)
    assert view == HealthView(
        "ejected", "3 requests in a row failed, the last with worker_failed", 1.5, 0.0, 1, False
    )


def test_failures_with_a_success_between_them_do_not(four: FleetHealth) -> None:
    for _ in range(20):
        fail(four, "a", 1.0, times=2)
        four.succeeded("a", 1.0)
    assert four.avoided(1.0) is NOBODY


def test_each_ejection_is_twice_as_long_up_to_the_longest(four: FleetHealth) -> None:
    now, lasted = 0.0, []
    fail(four, "a", now)
    for _ in range(6):
        due = four.next_due()
        assert due is not None
        lasted.append(due - now)
        now = due
        four.tick(now)
        assert states(four, now, "a") == ["probing"]
        fail(four, "a", now, times=1)
    assert lasted == pytest.approx([2.0, 4.0, 8.0, 16.0, 16.0, 16.0])
    assert four.view("a", now).ejections == 7


def test_a_good_time_is_rewarded_with_a_shorter_ejection(four: FleetHealth) -> None:
    now = 0.0
    fail(four, "a", now)
    for _ in range(2):
        now = four.next_due() or 0.0
        four.tick(now)
        fail(four, "a", now, times=1)
    now = four.next_due() or 0.0
    four.tick(now)
    four.succeeded("a", now)
    # Three ejections have been; two times the longest ejection have passed well.
    now += 2 * SPEC.max_ejection_s
    four.tick(now)
    fail(four, "a", now)
    assert four.view("a", now).for_s == pytest.approx(4.0)


def test_after_an_ejection_one_request_at_a_time_until_one_succeeds(four: FleetHealth) -> None:
    fail(four, "a", 0.0)
    assert four.avoided(1.99) == {"a"}
    assert four.avoided(2.0) is NOBODY
    assert states(four, 2.0, "a") == ["probing"]
    four.loaded("a", 1, 0.0)
    assert four.avoided(2.5) == {"a"}
    four.loaded("a", 0, 0.0)
    assert four.avoided(2.5) is NOBODY
    four.succeeded("a", 3.0)
    view = four.view("a", 3.0)
    assert (view.state, view.for_s) == ("slow_start", 10.0)
    assert view.share == pytest.approx(0.1)
    assert "ejected" in view.reason
    four.tick(13.0)
    assert four.view("a", 13.0) == HealthView(ejections=1)
    assert four.next_due() is None


def test_streams_that_run_on_through_an_ejection_do_not_keep_the_probe_away(four: FleetHealth) -> None:
    four.loaded("a", 7, 0.0)
    fail(four, "a", 0.0)
    assert four.avoided(2.0) is NOBODY
    four.loaded("a", 8, 0.0)
    assert four.avoided(2.0) == {"a"}


def test_what_comes_of_requests_from_before_changes_nothing_while_it_is_ejected(four: FleetHealth) -> None:
    fail(four, "a", 0.0)
    fail(four, "a", 1.0, times=9)
    four.succeeded("b", 1.5, 1.0)
    for _ in range(5):
        four.succeeded("a", 1.5, 100.0)
    assert four.view("a", 1.5).for_s == pytest.approx(0.5)
    assert four.view("a", 1.5).ejections == 1


def test_a_full_worker_is_left_alone_for_a_moment_and_not_the_worse_for_it(four: FleetHealth) -> None:
    four.failed("a", OVERLOADED, 1.0)
    assert four.avoided(1.0) == {"a"}
    view = four.view("a", 1.0)
    assert (view.state, view.reason, view.ejections) == ("ejected", "it answered worker_overloaded", 0)
    assert four.avoided(1.0 + BREAK_S) is NOBODY
    assert four.view("a", 1.0 + BREAK_S) == HealthView()
    fail(four, "a", 2.0)
    assert four.view("a", 2.0).for_s == pytest.approx(SPEC.ejection_s)


# -- slowness --------------------------------------------------------------------------------------


def test_a_worker_far_slower_than_foreseen_and_than_its_peers_is_ejected(four: FleetHealth) -> None:
    for worker_id in "bcd":
        four.succeeded(worker_id, 1.0, 1.2)
    for number in range(3):
        assert four.avoided(1.0) is NOBODY, number
        four.succeeded("a", 1.0, 20.0)
    assert four.avoided(1.0) == {"a"}
    assert four.view("a", 1.0).reason == (
        "first tokens took 20.0 times the predicted time, and 1.2 times on its peers"
    )


def test_slowness_that_all_have_in_common_is_no_workers_fault(four: FleetHealth) -> None:
    for _ in range(20):
        for worker_id in "abcd":
            four.succeeded(worker_id, 1.0, 30.0)
    assert states(four, 1.0, "abcd") == ["healthy"] * 4


def test_one_request_that_took_a_thousand_times_longer_ejects_nobody(four: FleetHealth) -> None:
    for worker_id in "abcd":
        for _ in range(5):
            four.succeeded(worker_id, 1.0, 1.0)
    four.succeeded("a", 1.0, 1000.0)
    assert four.avoided(1.0) is NOBODY


def test_a_worker_without_peers_is_never_too_slow() -> None:
    alone = health_of("a")
    for _ in range(20):
        alone.succeeded("a", 1.0, 1000.0)
    assert alone.avoided(1.0) is NOBODY
    assert not alone.panicking("pool")


def test_requests_that_were_taken_back_for_lateness_count_as_slow(four: FleetHealth) -> None:
    four.succeeded("b", 1.0, 1.0)
    for _ in range(3):
        four.late("a", 1.0, 9.0)
    assert four.avoided(1.0) == {"a"}


def test_after_an_ejection_slowness_is_judged_anew(four: FleetHealth) -> None:
    four.succeeded("b", 0.0, 1.0)
    for _ in range(3):
        four.succeeded("a", 0.0, 50.0)
    four.tick(2.0)
    four.succeeded("a", 2.0, 50.0)
    four.succeeded("a", 2.0, 1.0)
    four.succeeded("a", 2.0, 1.0)
    assert states(four, 2.0, "a") == ["slow_start"]


# -- silence ---------------------------------------------------------------------------------------


def test_a_worker_that_was_silent_comes_back_with_half_a_share_for_a_short_time(four: FleetHealth) -> None:
    four.interrupted("a", 1.0)
    view = four.view("a", 3.0)
    assert (view.state, view.share) == ("unresponsive", 0.0)
    assert view.reason == "it cannot be reached, for 2.0 s"
    four.resumed("a", 4.0)
    view = four.view("a", 4.0)
    assert (view.state, view.share, view.for_s) == ("slow_start", 0.5, 2.5)
    assert "could not be reached for 3.0 s" in view.reason
    four.tick(6.5)
    assert four.view("a", 6.5) == HealthView()


def test_a_connection_that_is_back_at_once_costs_nothing(four: FleetHealth) -> None:
    four.interrupted("a", 1.0)
    four.resumed("a", 1.0 + BLIP_S)
    assert four.view("a", 1.5) == HealthView()


def test_an_ejection_goes_on_after_a_silence(four: FleetHealth) -> None:
    fail(four, "a", 0.0)
    four.interrupted("a", 0.5)
    four.resumed("a", 1.5)
    assert states(four, 1.5, "a") == ["ejected"]
    four.interrupted("a", 1.6)
    four.tick(2.0)
    assert states(four, 2.0, "a") == ["unresponsive"]
    four.resumed("a", 4.0)
    assert states(four, 4.0, "a") == ["probing"]


# -- slow start ------------------------------------------------------------------------------------


def test_workers_that_come_up_together_all_have_their_full_share() -> None:
    health = health_of("abc")
    health.join("d", "pool", SPEC.slow_start_s / 2)
    assert states(health, 5.0, "abcd") == ["healthy"] * 4


def begin(health: FleetHealth, worker_id: str, now: float, legs: int) -> None:
    """One more request on a worker that runs `legs`, and over at once."""
    health.loaded(worker_id, legs + 1, now)
    health.loaded(worker_id, legs, now)


def test_a_cold_worker_runs_its_part_of_what_its_peers_run() -> None:
    health = health_of("abc")
    for worker_id in "abc":
        health.loaded(worker_id, 19, 100.0)
    health.join("new", "pool", 100.0)

    def most(now: float) -> int:
        legs = 0
        health.loaded("new", 0, now)
        for _ in range(2000):
            begin(health, "a", now, legs=19)
            if "new" not in health.avoided(now):
                legs += 1
                health.loaded("new", legs, now)
        return legs

    assert [most(now) for now in (100.0, 105.0, 109.0)] == [2, 11, 18]
    view = health.view("new", 105.0)
    assert (view.state, view.reason) == ("slow_start", "it has just joined")
    assert view.share == pytest.approx(0.55)
    assert health.avoided(110.0) is NOBODY


def test_a_cold_worker_begins_its_part_of_what_its_peers_begin() -> None:
    """However short the requests are."""
    health = health_of("abc")
    health.join("new", "pool", 100.0)

    def begun(now: float) -> int:
        count = 0
        for _ in range(100):
            for worker_id in "abc":
                begin(health, worker_id, now, legs=0)
            if "new" not in health.avoided(now):
                begin(health, "new", now, legs=0)
                count += 1
        return count

    assert [begun(now) for now in (100.0, 105.0)] == [pytest.approx(10, abs=1), pytest.approx(55, abs=1)]


def test_a_cold_worker_that_was_passed_over_is_not_flooded_afterwards() -> None:
    health = health_of("abc")
    health.join("new", "pool", 100.0)
    for _ in range(1000):
        begin(health, "a", 105.0, legs=0)
    begun = 0
    while "new" not in health.avoided(105.0):
        begin(health, "new", 105.0, legs=0)
        begun += 1
    assert begun == 2


def test_a_cold_worker_is_always_given_something() -> None:
    health = health_of("abc")
    health.join("new", "pool", 100.0)
    assert health.avoided(100.0) is NOBODY
    health.loaded("new", 1, 100.0)
    assert health.avoided(100.0) == {"new"}


def test_where_nobody_has_a_full_share_there_is_no_slow_start() -> None:
    health = health_of("a")
    health.join("new", "pool", 100.0)
    health.interrupted("a", 101.0)
    assert states(health, 101.0, ("new",)) == ["healthy"]  # type: ignore[arg-type]  # ids by themselves
    fail(health, "new", 102.0)
    health.leave("a")
    assert health.panicking("pool")


def test_a_pool_of_its_own_has_no_part_in_the_patience_of_another() -> None:
    health = health_of("abc")
    health.join("x", "another", 100.0)
    assert health.view("x", 100.0).state == "healthy"


def test_a_slow_start_can_be_left_out() -> None:
    health = health_of("ab", SPEC.model_copy(update={"slow_start_s": 0.0}))
    health.join("new", "pool", 100.0)
    fail(health, "a", 100.0)
    health.tick(102.0)
    health.succeeded("a", 102.0)
    assert states(health, 102.0, "ab") == ["healthy", "healthy"]
    assert health.avoided(102.0) is NOBODY


# -- too much of it --------------------------------------------------------------------------------


def test_when_more_than_half_of_a_pool_looks_bad_it_gets_what_the_rest_has_no_room_for(
    four: FleetHealth,
) -> None:
    fail(four, "a", 0.0)
    fail(four, "b", 0.0)
    assert four.avoided(0.0) == {"a", "b"}
    assert not four.panicking("pool")
    assert not four.press(False)
    fail(four, "c", 0.5)
    assert four.avoided(0.5) == {"a", "b", "c"}
    assert four.panicking("pool")
    view = four.view("c", 0.5)
    assert (view.state, view.panic, view.share) == ("ejected", True, 0.0)
    assert four.press(True)
    assert four.avoided(0.5) is NOBODY
    assert four.view("c", 0.5).share == 1.0
    assert not four.press(True)
    # The first two are out of it, and are probed, while the third is left alone.
    assert four.avoided(2.0) == {"c"}
    assert not four.panicking("pool")


def test_silent_workers_count_as_bad_ones(four: FleetHealth) -> None:
    four.interrupted("a", 0.0)
    four.interrupted("b", 0.0)
    assert not four.panicking("pool")
    fail(four, "c", 0.0)
    assert four.panicking("pool")
    assert four.avoided(0.0) == {"c"}
    four.press(True)
    assert four.avoided(0.0) is NOBODY
    four.resumed("a", 0.1)
    assert four.avoided(0.1) == {"c"}


def test_panic_of_one_pool_does_not_help_another() -> None:
    health = health_of("abcd")
    for worker_id in "wxyz":
        health.join(worker_id, "other", 0.0)
    for worker_id in "abcw":
        fail(health, worker_id, 0.0)
    assert health.avoided(0.0) == {"w", "a", "b", "c"}
    health.press(True)
    assert health.avoided(0.0) == {"w"}
    assert (health.panicking("pool"), health.panicking("other")) == (True, False)


def test_a_worker_with_all_that_one_router_gives_is_passed_over_in_panic_too(four: FleetHealth) -> None:
    four.loaded("d", SPEC.max_legs, 0.0)
    assert four.avoided(0.0) == {"d"}
    assert four.view("d", 0.0).reason == "40 requests run there, which is one router's limit for a worker"
    for worker_id in "abc":
        fail(four, worker_id, 0.0)
    assert four.avoided(0.0) == {"d"}
    four.loaded("d", SPEC.max_legs - 1, 0.0)
    assert four.avoided(0.0) == {"a", "b", "c"}


def test_a_worker_that_leaves_leaves_nothing_behind(four: FleetHealth) -> None:
    fail(four, "a", 0.0)
    four.loaded("b", 99, 0.0)
    for worker_id in "abcd":
        four.leave(worker_id)
    four.leave("never")
    assert four.avoided(0.0) is NOBODY
    assert four.next_due() is None
    assert not four.panicking("pool")
    four.join("a", "pool", 1.0)
    assert four.view("a", 1.0) == HealthView()


def test_what_is_said_of_workers_that_are_not_known_is_ignored() -> None:
    health = FleetHealth(SPEC)
    health.succeeded("x", 0.0, 3.0)
    health.failed("x", FAILED, 0.0)
    health.late("x", 0.0, 3.0)
    health.interrupted("x", 0.0)
    health.resumed("x", 0.0)
    health.loaded("x", 3, 0.0)
    assert health.view("x", 0.0) == HealthView()


# -- whatever happens ------------------------------------------------------------------------------

WORKERS = [f"w{number}" for number in range(6)]
Act = Callable[[FleetHealth, str, float, int], object]
ACTIONS: dict[str, Act] = {
    "join": lambda health, worker_id, now, size: health.join(worker_id, "pool", now),
    "leave": lambda health, worker_id, now, size: health.leave(worker_id),
    "fail": lambda health, worker_id, now, size: fail(health, worker_id, now),
    "overload": lambda health, worker_id, now, size: health.failed(worker_id, OVERLOADED, now),
    "succeed": lambda health, worker_id, now, size: health.succeeded(worker_id, now),
    "slow": lambda health, worker_id, now, size: health.succeeded(worker_id, now, 1.0 + size),
    "late": lambda health, worker_id, now, size: health.late(worker_id, now, 1.0 + size),
    "interrupt": lambda health, worker_id, now, size: health.interrupted(worker_id, now),
    "resume": lambda health, worker_id, now, size: health.resumed(worker_id, now),
    "load": lambda health, worker_id, now, size: health.loaded(worker_id, size, now),
}
HAPPENINGS = st.lists(
    st.tuples(
        st.sampled_from(WORKERS), st.sampled_from(sorted(ACTIONS)), st.floats(0.0, 3.0), st.integers(0, 45)
    ),
    max_size=60,
)


@given(HAPPENINGS, st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_no_more_of_a_pool_is_ejected_in_effect_than_is_allowed(
    happenings: list[tuple[str, str, float, int]], most: float
) -> None:
    health, now = health_of(WORKERS, SPEC.model_copy(update={"max_ejected": most})), 0.0
    health.press(True)
    here = set(WORKERS)
    for worker_id, action, after, size in happenings:
        now += after
        ACTIONS[action](health, worker_id, now, size)
        here = here | {worker_id} if action == "join" else here - {worker_id} if action == "leave" else here
        avoided = health.avoided(now)
        views = {each: health.view(each, now) for each in here}
        ejected = {each for each in avoided if views[each].state == "ejected" and views[each].share == 0.0}
        assert avoided <= here
        assert len(ejected) <= most * len(here)
        due = health.next_due()
        assert due is None or due > now


@given(HAPPENINGS)
def test_when_all_is_well_again_all_are_used_again(happenings: list[tuple[str, str, float, int]]) -> None:
    health, now = health_of(WORKERS), 0.0
    for worker_id, action, after, size in happenings:
        now += after
        ACTIONS[action](health, worker_id, now, size)
    for worker_id in WORKERS:
        health.resumed(worker_id, now)
        health.loaded(worker_id, 0, now)
    for _ in range(4 * len(WORKERS)):
        due = health.next_due()
        if due is None:
            break
        now = max(now, due)
        health.tick(now)
        for worker_id in WORKERS:
            health.succeeded(worker_id, now, 1.0)
    assert health.next_due() is None
    assert health.avoided(now) is NOBODY
    assert {health.view(worker_id, now).state for worker_id in WORKERS} == {"healthy"}
