"""A decision for every pool after every rule, with its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.demand import Traffic, WorkerStats
from kvasir.core.requests import Role
from kvasir_platform.planner.capacity import SloTarget
from kvasir_platform.planner.demand import Interval
from kvasir_platform.planner.forecast import Predictor, Steady, predictors
from kvasir_platform.planner.planner import Decision, ModelRules, Planner, PoolRules, PoolState
from kvasir_platform.planner.sizes import Bounds

STEP_S = 10.0
START_S = 60.0
HOURS = 1500
"""Looks after which it is known how little a steady load takes."""
ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}


class Stage:
    """A model with a prefill and a decode pool. A request keeps a prefill worker busy for a second, and fifty
    at once fill a decode worker for a second."""

    def __init__(
        self,
        bounds: tuple[int, int] = (1, 20),
        have: int = 4,
        made: Callable[[], Sequence[Predictor]] = predictors,
        roles: dict[str, Role] | None = None,
        **rules: Any,
    ) -> None:
        self.roles = ROLES if roles is None else roles
        pools = tuple(PoolRules(Bounds(name, role, *bounds), 50) for name, role in self.roles.items())
        told: dict[str, Any] = {"interval_s": STEP_S, "window_s": 30.0, "idle_s": 100.0} | rules
        self.planner = Planner(ModelRules(pools, SloTarget(10.0, 0.1), **told), made=made)
        self.states = {name: PoolState(have, 0, START_S) for name in self.roles}
        self.now = 0.0
        self.last: dict[str, Decision] = {}
        self.follows = True

    def state(self, pool: str, serving: int, starting: int = 0, **more: Any) -> None:
        self.states[pool] = PoolState(serving, starting, START_S, **more)

    def step(self, arrived: int, *, ended: int | None = None, measured: bool = True, **news: int) -> None:
        ended = arrived if ended is None else ended
        traffic = Traffic(
            arrived=arrived,
            ended=ended,
            prompt_tokens=1000 * ended,
            computed_tokens=1000 * ended,
            computed_squares=1000**2 * ended,
            output_tokens=100 * ended,
            **({"judged": ended, "met": ended} | news),
        )
        workers = [
            WorkerStats(f"{name}-{n}", name, role, True, 0.0, 0.001, 0.01, 0.0016, 0, 10**6, 0, 0)
            for name, role in self.roles.items()
            for n in range(self.states[name].serving)
        ]
        self.now += STEP_S
        found = self.planner.plan(
            Interval(STEP_S, traffic), self.states, workers if measured else [], self.now
        )
        self.last = {each.pool: each for each in found}

    def run(self, arrived: int, steps: int, **news: int) -> Stage:
        """So many looks alike, and what is decided is there at once where that is `follows`."""
        for _ in range(steps):
            self.step(arrived, **news)  # type: ignore[arg-type]  # of Traffic, by name
            if self.follows:
                for name, each in self.last.items():
                    if self.states[name].pinned is None:
                        self.state(name, each.size)
        return self

    def size(self, pool: str = "prefill") -> int:
        return self.last[pool].size

    def why(self, pool: str = "prefill") -> str:
        return "; ".join(self.last[pool].because)


def test_before_anything_was_measured_there_is_what_there_is() -> None:
    stage = Stage()
    stage.step(100, ended=0, measured=False)
    assert stage.size() == 4
    assert stage.why() == "nothing is measured yet"


def test_a_pool_gets_what_its_work_takes_and_something_to_spare() -> None:
    stage = Stage().run(30, HOURS)
    found = stage.last["prefill"]
    assert found.load == pytest.approx(3.0)
    assert found.need == pytest.approx(found.upper)
    assert 3.0 < found.need <= found.size <= 5
    assert stage.size("decode") == 1
    assert stage.last["decode"].load == pytest.approx(30 * 100 / STEP_S / (50 / 0.09), rel=0.01)


def test_until_it_is_known_how_little_suffices_forecasts_are_raised_by_more() -> None:
    found = Stage().run(30, 60).last["prefill"]
    assert found.margin == 1.6
    assert found.size == 6


def test_what_was_measured_stays_known_while_there_is_no_worker() -> None:
    stage = Stage().run(30, 30)
    known = stage.last["prefill"].capacity
    stage.state("prefill", 0)
    stage.step(30)
    assert stage.last["prefill"].capacity == known
    assert stage.last["prefill"].need > 3.0


def test_both_parts_of_the_work_are_foreseen_apart_from_each_other() -> None:
    stage = Stage(made=lambda: [Steady("steady", 60.0)]).run(30, 60)
    assert {name: round(each.expected - each.load, 1) for name, each in stage.last.items()} == {
        "prefill": round(stage.last["prefill"].capacity.spare, 1),  # type: ignore[union-attr]  # measured
        "decode": round(stage.last["decode"].capacity.spare, 1),  # type: ignore[union-attr]  # measured
    }


def test_all_roles_are_sized_by_the_same_forecast_and_name_it() -> None:
    stage = Stage().run(30, 60)
    for arrived in (30, 45, 90, 120, 120):
        stage.step(arrived)
        prefill, decode = (stage.last[name] for name in ROLES)
        assert prefill.predictor == decode.predictor
        busy = [each.expected - (each.capacity.spare if each.capacity else 0.0) for each in (prefill, decode)]
        assert busy[0] / prefill.load == pytest.approx(busy[1] / decode.load)


class Hushed(Steady):
    """Says nothing any more from some time on."""

    def __init__(self, name: str, from_s: float) -> None:
        super().__init__(name, 60.0)
        self._left_s = from_s

    def take(self, value: float, seconds: float) -> None:
        super().take(value, seconds)
        self._left_s -= seconds

    def ahead(self, horizon_s: float) -> float | None:
        return super().ahead(horizon_s) if self._left_s > 0.0 else None


class Wavers(Steady):
    """Foresees now the load and now three times as much."""

    looks = 0

    def ahead(self, horizon_s: float) -> float | None:
        self.looks += 1
        ahead = super().ahead(horizon_s)
        return ahead if ahead is None or self.looks % 12 < 6 else 3.0 * ahead


def test_when_the_one_that_is_followed_falls_silent_what_the_first_says_counts() -> None:
    stage = Stage(made=lambda: [Wavers("wavers", 60.0), Hushed("hushed", 14_000.0)])
    assert stage.run(30, 1390).last["prefill"].predictor == "hushed"
    for _ in range(30):
        stage.step(30)
        assert stage.last["prefill"].expected > 1.0


def test_what_waits_for_long_is_worked_off_and_never_asks_for_more_than_the_load_on_top() -> None:
    stage = Stage().run(30, 60)
    usual = stage.last["prefill"]
    assert stage.why() == ""
    stage.step(30, waiting=10, waiting_tokens=10_000)
    assert stage.why() == ""
    stage.step(30, waiting=200, waiting_tokens=200_000)
    assert stage.why().startswith("includes queued work")
    assert stage.last["prefill"].need > usual.need
    stage.step(30, waiting=10**6, waiting_tokens=10**9)
    assert stage.last["prefill"].need <= usual.upper + usual.load + 1e-6


@pytest.mark.parametrize("waiting", [0, 3])
def test_what_is_late_for_want_of_workers_makes_careful_and_what_is_late_otherwise_does_not(
    waiting: int,
) -> None:
    stage = Stage().run(30, 20, waiting=waiting).run(30, 20, met=20, waiting=waiting)
    assert (stage.planner.ledger.overdrawn > 0.0) is (waiting > 0)


def test_what_is_late_while_replicas_start_that_are_needed_makes_careful() -> None:
    stage = Stage(have=3)
    stage.follows = False
    stage.state("prefill", 3, 5)
    stage.run(30, 20).run(30, 20, met=20)
    assert stage.planner.ledger.overdrawn > 0.0


@pytest.mark.parametrize("why", ["it may not", "it does not come up", "it is pinned"])
def test_what_is_late_where_a_pool_could_not_have_what_was_wanted_makes_nobody_careful(why: str) -> None:
    stage = Stage(have=3, bounds=(1, 3 if why == "it may not" else 20))
    stage.follows = False
    if why == "it is pinned":
        stage.state("prefill", 3, pinned=3)
    stage.run(60, 40, met=20)
    assert stage.planner.ledger.overdrawn == 0.0


# -- rules -------------------------------------------------------------------------------------------


def test_bounds_are_kept_and_say_so() -> None:
    stage = Stage(bounds=(2, 3)).run(20, 60)
    assert stage.size() == 3
    assert "limited to scaling.max 3: the need is " in stage.why()
    assert stage.size("decode") == 2
    assert stage.why("decode") == "raised to scaling.min 2"


def test_bounds_are_kept_also_where_they_are_near_to_what_there_is() -> None:
    stage = Stage(bounds=(19, 20), have=18)
    stage.follows = False
    stage.run(10, 3)
    assert stage.size() == 19


def test_no_more_than_the_double_and_no_fewer_than_three_quarters_at_once() -> None:
    stage = Stage(have=4)
    stage.follows = False
    stage.run(190, 3)
    assert stage.size() == 8
    assert "at most 4 start at once" in stage.why()
    stage = Stage(have=16)
    stage.follows = False
    stage.run(10, 10)
    assert stage.size() == 12
    assert "at most 4 are removed at once" in stage.why()


def test_a_pool_of_one_still_grows_and_shrinks_by_one() -> None:
    stage = Stage(have=1)
    stage.follows = False
    stage.run(190, 3)
    assert stage.size() == 2
    stage.state("prefill", 2)
    stage.run(1, 30)
    assert stage.size() == 1


def test_fewer_are_held_back_by_what_was_wanted_within_the_window() -> None:
    stage = Stage(made=lambda: [Steady("now", 1.0)], window_s=60.0).run(60, 40)
    high = stage.size()
    for _ in range(3):
        stage.step(5)
        assert stage.size() == high
        assert "a larger size was desired within half of the last 60 s" in stage.why()
    stage.step(5)
    assert stage.size() < high


def test_by_default_the_window_is_as_long_as_two_starts() -> None:
    stage = Stage(made=lambda: [Steady("now", 1.0)], window_s=None).run(60, 40)
    stage.step(5)
    assert f"a larger size was desired within half of the last {2 * START_S:.0f} s" in stage.why()


def test_where_about_as_many_are_there_as_are_wanted_it_is_left_at_that() -> None:
    stage = Stage(have=20, bounds=(1, 30), made=lambda: [Steady("now", 1.0)])
    stage.follows = False
    stage.run(127, 40)
    assert abs(stage.last["prefill"].need - 20) < 2
    assert stage.size() == 20


def test_those_that_do_not_come_up_are_named_and_none_is_asked_for_on_top() -> None:
    stage = Stage(have=2)
    stage.follows = False
    stage.state("prefill", 2, 1, stuck=1)
    stage.run(60, 20)
    assert stage.size() == 3
    assert "1 start too slowly: no more are requested" in stage.why()
    stage.state("prefill", 2, 0)
    stage.step(60)
    assert stage.size() > 3


def test_a_pool_that_has_just_what_it_should_says_that_some_of_it_does_not_come_up() -> None:
    stage = Stage(bounds=(1, 3))
    stage.follows = False
    stage.state("prefill", 2, 1, stuck=1)
    stage.run(60, 20)
    assert stage.size() == 3
    assert "1 start too slowly" in stage.why()


def test_of_those_that_do_not_come_up_may_go_what_is_not_wanted() -> None:
    stage = Stage(have=2)
    stage.follows = False
    stage.state("prefill", 2, 6, stuck=6)
    stage.run(10, 20)
    assert stage.size() < 8


@pytest.mark.parametrize("size", [0, 1, 9, 20])
def test_a_pin_has_the_last_word(size: int) -> None:
    stage = Stage()
    stage.state("prefill", 4, pinned=size)
    stage.run(30, 10)
    assert stage.size() == size
    assert stage.why().endswith(f"pinned to {size}")


def test_a_pin_from_before_a_smaller_bound_is_kept_within_it() -> None:
    stage = Stage(bounds=(1, 5))
    stage.state("prefill", 5, pinned=8)
    stage.run(30, 3)
    assert stage.size() == 5
    assert stage.why().endswith("pinned to 8; limited to scaling.max 5")


# -- no replica at all -------------------------------------------------------------------------------


def test_a_model_that_may_sleep_keeps_one_until_nobody_has_asked_for_long_enough() -> None:
    stage = Stage(bounds=(0, 20)).run(30, 20)
    stage.run(0, 10)
    assert min(stage.size(), stage.size("decode")) >= 1
    stage.run(0, 8)
    assert (stage.size(), stage.size("decode")) == (0, 0)
    assert "no request for the model for 100 s" in stage.why()


@pytest.mark.parametrize("news", [{"in_flight": 1}, {"arrived": 1}], ids=["it answers", "it is asked"])
def test_a_model_does_not_sleep_while_there_is_anything_to_do(news: dict[str, int]) -> None:
    stage = Stage(bounds=(0, 20)).run(30, 20)
    for _ in range(60):
        stage.step(news.get("arrived", 0), ended=0, in_flight=news.get("in_flight", 0))
        for name, each in stage.last.items():
            assert each.size >= 1
            stage.state(name, each.size)


def test_a_model_does_not_go_back_to_sleep_while_it_wakes() -> None:
    stage = Stage(bounds=(0, 20)).run(30, 20).run(0, 40)
    assert stage.size() == 0
    for pool in ROLES:
        stage.state(pool, 0, 1)
    stage.follows = False
    stage.run(0, 40)
    assert stage.size() >= 1


def test_a_model_that_may_not_sleep_keeps_its_least() -> None:
    stage = Stage(bounds=(1, 20)).run(30, 20).run(0, 60)
    assert (stage.size(), stage.size("decode")) == (1, 1)


def test_embeddings_are_sized_by_what_is_at_work_and_not_by_tokens() -> None:
    stage = Stage(roles={"embed": Role.EMBED}).run(10, HOURS, in_flight=140)
    assert stage.last["embed"].load == pytest.approx(140 / 35)
    assert 4 <= stage.size("embed") <= 6


@given(
    news=st.lists(st.tuples(st.sampled_from([0, 1, 40, 400]), st.sampled_from([0, 5, 10**6])), max_size=25),
    bounds=st.sampled_from([(0, 3), (1, 1), (2, 9)]),
    comes_up=st.booleans(),
)
def test_whatever_comes_sizes_are_within_their_bounds_and_change_by_little_at_once(
    news: list[tuple[int, int]], bounds: tuple[int, int], comes_up: bool
) -> None:
    stage = Stage(bounds=bounds, have=max(1, bounds[0]))
    for arrived, waiting in news:
        stage.step(arrived, waiting=waiting, waiting_tokens=1000 * waiting, in_flight=waiting)
        for name, each in stage.last.items():
            have = stage.states[name].have
            assert bounds[0] <= each.size <= bounds[1]
            assert each.size <= have + max(1, have)
            assert each.size >= 1 or waiting == 0
            serving = each.size if comes_up else min(each.size, stage.states[name].serving)
            stage.state(name, serving, each.size - serving)
