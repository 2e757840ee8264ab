"""Autoscaled pools meet their SLO over hours of traffic: stable, correct with wrong inputs, and explained."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.config.spec.deployment import Deployment, PoolScalingSpec, PoolSpec, ScalingSpec, SloSpec
from kvasir.config.spec.models import ModelSpec
from kvasir.core.demand import PlannerReply
from kvasir.core.requests import Role
from kvasir.ports.scaler import ReplicaState
from kvasir_platform.planner.forecast import Predictor, Steady
from kvasir_platform.planner.loop import ScalingLoop
from kvasir_platform.planner.planner import Planner
from kvasir_platform.sim.scaling.days import Day, LoadBurst, RequestShape, arrivals
from kvasir_platform.sim.scaling.fleet import Kind, ScaledFleet, SimSlo

HOUR_S = 3600.0
LOOK_S = 5.0
KIND = Kind(
    prefill_fixed_s=0.02,
    prefill_token_s=2e-4,
    prefill_context_s=0.0,
    step_fixed_s=0.02,
    step_stream_s=0.001,
    step_kv_token_s=0.0,
    kv_tokens=400_000,
    most_streams=64,
    start_s=60.0,
)
LEVEL = SimSlo(ttft_s=10.0, itl_s=0.08)
# Two seconds of a prefill worker, and of a decode worker about one in ten.
USUAL = RequestShape(prompt=12_000, computed=10_000, output=200)
LONG_PROMPTS = RequestShape(prompt=16_000, computed=14_000, output=60)
LONG_ANSWERS = RequestShape(prompt=300, computed=200, output=1_500)
Bounds = Mapping[str, tuple[int, int]]
WIDE: Bounds = {"prefill": (1, 40), "decode": (1, 20)}
SLEEPY: Bounds = {"prefill": (0, 9), "decode": (0, 9)}
ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}


def poisson(rates: np.ndarray, seed: int = 1) -> list[float]:
    """Arrivals at a rate for each second."""
    return [float(at) for at in arrivals(np.asarray(rates, dtype=float), np.random.default_rng(seed))]


def steadily(rate: float, seconds: float) -> np.ndarray:
    return np.full(int(seconds), rate)


def wave(seconds: float, period_s: float = 5400.0) -> np.ndarray:
    return np.asarray(1.6 - 0.6 * np.cos(2 * math.pi * np.arange(seconds) / period_s))


def square(seconds: float, low: float = 1.0, period_s: int = 480) -> np.ndarray:
    """Three times as much in every second half of a period."""
    return np.where(np.arange(seconds) // (period_s // 2) % 2 == 0, low, 3 * low)


def turns(sizes: Sequence[int]) -> int:
    """How often sizes that grew begin to fall, or the other way round."""
    steps = [after - before for before, after in itertools.pairwise(sizes) if after != before]
    return sum((one > 0) != (other > 0) for one, other in itertools.pairwise(steps))


@dataclass
class Play:
    """A fleet, what comes to it, and the loop that sizes it; `sizes` are what did each part of the work, or
    was about to, at each look."""

    times: list[float]
    shapes: RequestShape | Callable[[float], RequestShape] = USUAL
    kind: Kind = KIND
    begin: tuple[int, int] = (4, 2)
    bounds: Bounds = field(default_factory=lambda: WIDE)
    made: Callable[[], Sequence[Predictor]] | None = None
    scaling: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0
    sizes: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    because: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    told: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        of = self.shapes
        shapes = [of if isinstance(of, RequestShape) else of(at) for at in self.times]
        begin = dict(zip(ROLES, self.begin, strict=True))
        pools = {name: (role, begin[name]) for name, role in ROLES.items()}
        self.fleet = ScaledFleet(self.kind, LEVEL, pools, self.times, shapes)
        self.fleet.epoch = "e"
        deployment = Deployment(
            model=ModelSpec(source="kvasir-tiny", served_name="model"),
            slo=(SloSpec(name="default", ttft_s=LEVEL.ttft_s, itl_s=LEVEL.itl_s),),
            pools=tuple(
                PoolSpec(
                    name=name,
                    role=role,
                    replicas=begin[name],
                    scaling=PoolScalingSpec(min=self.bounds[name][0], max=self.bounds[name][1]),
                )
                for name, role in ROLES.items()
            ),
            scaling=ScalingSpec(**self.scaling),
        )
        self.loop = ScalingLoop(deployment, self.fleet, epoch="e", tell=self._tell)
        if self.made is not None:
            model = self.loop._models["model"]
            model.planner = Planner(model.planner.rules, made=self.made)
        self.word = PlannerReply("", False, {}, {}, {})

    def _tell(self, _event: str, **details: object) -> None:
        self.told.append(details)

    def run(self, seconds: float, *, hears: bool = True) -> Play:
        """Let time pass; routers are heard, or not."""
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_S
            self.fleet.run(self.now)
            if hears:
                self.word = self.loop.take(self.fleet.report(), self.now)
                self.fleet.assign(self.word.roles)
            self.loop.step(self.now)
            for name, plan in self.word.pools.items():
                self.sizes[name].append(plan.serving + plan.starting)
            for pool in self.pools.values():
                self.because[pool["pool"]] |= set(pool["because"])
        return self

    @property
    def explain(self) -> dict[str, Any]:
        return self.loop.explain(self.now)

    @property
    def pools(self) -> dict[str, dict[str, Any]]:
        return {pool["pool"]: pool for pool in self.explain["pools"]}

    @property
    def acts(self) -> list[dict[str, Any]]:
        return list(self.explain["acts"])

    def homes(self) -> dict[str, int]:
        """Replicas by the pool that they belong to, whatever they do."""
        return {name: self.fleet.size(name) for name in ROLES}

    def stuck(self) -> list[str]:
        return [each.replica_id for each in self.fleet.observe() if each.state is ReplicaState.STARTING]

    def met_while(self, seconds: float) -> float:
        """The part of the requests that got their level within that time."""
        met, judged = self.fleet.met, self.fleet.judged
        self.run(seconds)
        return (self.fleet.met - met) / (self.fleet.judged - judged)


# -- load that flaps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pools_learn_to_stand_still_under_a_load_that_flaps(seed: int) -> None:
    play = Play(poisson(square(2 * HOUR_S), seed))
    play.run(HOUR_S)
    first = {pool: turns(sizes) for pool, sizes in play.sizes.items()}
    play.sizes.clear()
    play.because.clear()
    assert play.met_while(HOUR_S) >= 0.99
    second = {pool: turns(sizes) for pool, sizes in play.sizes.items()}
    # The load itself turns fifteen times an hour, and by three times.
    assert all(count <= 20 for count in first.values())
    assert all(count <= 15 for count in second.values())
    for sizes in play.sizes.values():
        assert max(sizes) <= 2 * min(sizes)
    assert any(why.startswith("a larger size was desired within ") for why in play.because["prefill"])


def test_the_window_that_holds_a_pool_is_named_and_longer_than_at_rest() -> None:
    play = Play(poisson(square(HOUR_S)), scaling={"start_s": KIND.start_s}).run(HOUR_S)
    said = {why for why in play.because["prefill"] if why.startswith("a larger size was desired")}
    assert said == {
        "a larger size was desired within half of the last 120 s",
        "a larger size was desired within the last 360 s",
    }


# -- forecasts that are wrong ------------------------------------------------------------------------


class Off:
    """Foresees what has been, times `by` after `from_s`."""

    name = "off"

    def __init__(self, by: float, from_s: float = 0.0) -> None:
        self._inner = Steady("inner", 60.0)
        self._by, self._from_s, self._passed_s = by, from_s, 0.0

    def take(self, value: float, seconds: float) -> None:
        self._passed_s += seconds
        self._inner.take(value, seconds)

    def ahead(self, horizon_s: float) -> float | None:
        ahead = self._inner.ahead(horizon_s)
        return ahead if ahead is None or self._passed_s < self._from_s else self._by * ahead


def predicted(by: float, seconds: float, from_s: float = 0.0) -> Play:
    return Play(poisson(wave(seconds)), made=lambda: [Off(by, from_s)])


OFF = (1.0, 3.0, 1 / 3)


@pytest.mark.slow
def test_a_predictor_that_is_always_wrong_is_corrected_by_what_came() -> None:
    honest, *wrong = plays = [predicted(by, 3 * HOUR_S).run(HOUR_S) for by in OFF]
    for play, pool in itertools.product(wrong, ROLES):
        assert max(play.sizes[pool]) <= 3 * max(honest.sizes[pool])
    for play in plays:
        play.sizes.clear()
        assert play.met_while(2 * HOUR_S) >= 0.99
    for play, pool in itertools.product(wrong, ROLES):
        mean, right = np.mean(play.sizes[pool]), np.mean(honest.sizes[pool])
        assert right / 1.25 <= mean <= 1.25 * right
        assert turns(play.sizes[pool]) <= turns(honest.sizes[pool]) + 2


@pytest.mark.slow
def test_a_predictor_that_goes_wrong_costs_no_more_than_it_is_wrong_by_and_for_a_time() -> None:
    honest, *wrong = plays = [predicted(by, 4.5 * HOUR_S, 1.5 * HOUR_S).run(1.5 * HOUR_S) for by in OFF]
    for play in plays:
        play.sizes.clear()
        assert play.met_while(1.5 * HOUR_S) >= 0.99
    for play, pool in itertools.product(wrong, ROLES):
        assert max(play.sizes[pool]) <= 3 * max(honest.sizes[pool])
        assert turns(play.sizes[pool]) <= 25
    assert all(turns(sizes) <= 5 for sizes in honest.sizes.values())
    for play in plays:
        play.sizes.clear()
        assert play.met_while(1.5 * HOUR_S) >= 0.99
    for play, pool in itertools.product(wrong, ROLES):
        assert np.mean(play.sizes[pool]) <= 1.6 * np.mean(honest.sizes[pool])


# -- workers that do not come up ---------------------------------------------------------------------


def never_ready(count: int, bounds: Bounds = WIDE, lasts_s: float = 3 * HOUR_S) -> Play:
    """Of the next that are asked for so many do not come up; and there is twice as much to do for so long."""
    rates = np.concatenate([steadily(1.0, 900), steadily(2.0, lasts_s), steadily(1.0, 3 * HOUR_S)])
    play = Play(poisson(rates), bounds=bounds, scaling={"start_timeout_s": 120.0, "flips": False}).run(900)
    asked = play.fleet._asked
    play.fleet._kind = replace(KIND, never_ready=frozenset(range(asked + 1, asked + 1 + count)))
    return play


def test_a_worker_that_never_becomes_ready_goes_first_and_the_others_go_on_serving() -> None:
    play = never_ready(1, lasts_s=1800.0)
    seen = set[str]()
    while play.now < 0.5 * HOUR_S or play.stuck():
        play.run(LOOK_S)
        seen |= set(play.stuck())
        assert play.now < HOUR_S
    assert play.fleet.starts >= len(seen) >= 1
    assert play.met_while(HOUR_S) >= 0.99


def test_no_more_are_asked_for_while_some_do_not_come_up() -> None:
    bounds = {"prefill": (1, 12), "decode": (1, 4)}
    play = never_ready(1000, bounds)
    serving = {name: pool["serving"] for name, pool in play.pools.items()}
    play.run(600)
    asked = play.fleet.starts
    assert all(play.fleet.size(pool) <= most for pool, (_, most) in bounds.items())
    play.run(1.5 * HOUR_S)
    assert play.fleet.starts == asked
    assert "start too slowly" in play.pools["prefill"]["why"]
    assert {name: pool["serving"] for name, pool in play.pools.items()} == serving


def test_pools_grow_again_once_what_did_not_come_up_is_gone() -> None:
    play = never_ready(20)
    play.run(1800)
    assert play.stuck()
    # Whoever owns the pools gives up, and mends what was wrong.
    play.fleet._kind = KIND
    for pool in ROLES:
        play.fleet.retire(pool, play.stuck())
    play.run(0.5 * HOUR_S)
    assert play.met_while(HOUR_S) >= 0.99
    assert not any("start too slowly" in pool["why"] for pool in play.pools.values())


# -- metrics that stop -------------------------------------------------------------------------------


@pytest.mark.parametrize("silent_s", [50.0, 300.0], ids=["for a moment", "for so long that it is forgotten"])
def test_no_size_changes_while_routers_say_nothing_and_none_jumps_after(silent_s: float) -> None:
    play = Play(poisson(steadily(1.5, HOUR_S))).run(1500)
    before = {pool: max(sizes[-120:]) for pool, sizes in play.sizes.items()}
    # As of the last decision that was based on something.
    play.run(20, hears=False)
    held, starts = play.homes(), play.fleet.starts
    for _ in range(int((silent_s - 20) / LOOK_S)):
        play.run(LOOK_S, hears=False)
        assert play.homes() == held
    assert play.fleet.starts == starts
    assert "no report from router" in play.explain["frozen"] or "no router" in play.explain["frozen"]
    assert [str(each["frozen"])[:21] for each in play.told if each.get("frozen")][
        -1
    ] == "no report from router"
    play.sizes.clear()
    play.run(120)
    assert play.explain["frozen"] is None
    assert {"frozen": None} in play.told
    # What had come in the meantime is not taken for a crowd.
    assert all(max(play.sizes[pool]) <= before[pool] + 2 for pool in ROLES)


def test_sizes_follow_the_load_again_after_a_silence() -> None:
    rates = np.concatenate([steadily(1.0, 1200), steadily(3.0, 3000)])
    play = Play(poisson(rates)).run(1100)
    small = play.fleet.size("prefill")
    play.run(300, hears=False)
    play.run(900)
    assert play.fleet.size("prefill") > small
    assert play.met_while(1800) >= 0.99


# -- no replica at all -------------------------------------------------------------------------------

IDLE_S = 300.0


def sleepy(*times: float, **scaling: object) -> Play:
    early = [1.0 + second for second in range(200)]
    return Play(
        [*early, *times], begin=(4, 2), bounds=SLEEPY, scaling={"idle_s": IDLE_S, "start_s": 90.0} | scaling
    )


def test_a_model_that_nobody_asks_for_has_no_replica_after_its_time_and_not_before() -> None:
    play = sleepy()
    play.run(200 + IDLE_S)
    assert all(play.homes().values())
    assert play.word.ready_in_s == {}
    play.run(60)
    assert play.homes() == {"prefill": 0, "decode": 0}
    assert play.word.ready_in_s == {"model": 90.0}
    assert "no request for the model for 300 s" in play.pools["prefill"]["why"]


def test_a_request_that_waits_wakes_its_model_and_routers_are_told_when() -> None:
    play = sleepy(2000.0).run(1995)
    assert play.homes() == {"prefill": 0, "decode": 0}
    play.run(10)
    woken = [(act["pool"], act["count"], act["done"]) for act in play.acts if act["what"] == "wake"]
    assert woken == [("prefill", 1, True), ("decode", 1, True)]
    assert 80.0 <= play.word.ready_in_s["model"] <= 90.0
    play.run(30)
    assert 50.0 <= play.word.ready_in_s["model"] <= 60.0
    play.run(60)
    assert play.word.ready_in_s == {}
    assert play.fleet.judged == 201
    play.run(2 * IDLE_S)
    assert play.homes() == {"prefill": 0, "decode": 0}


def test_a_start_that_was_measured_is_what_routers_are_told_the_next_time() -> None:
    play = sleepy(2000.0, 4000.0).run(3990)
    assert play.word.ready_in_s["model"] == pytest.approx(KIND.start_s, abs=2 * LOOK_S)


def test_a_model_keeps_its_workers_while_it_answers_anything_however_long() -> None:
    forever = RequestShape(prompt=100, computed=100, output=60_000)
    play = Play(
        [10.0, 11.0],
        shapes=lambda at: forever if at == 10.0 else USUAL,
        begin=(1, 1),
        bounds=SLEEPY,
        scaling={"idle_s": 60.0},
    )
    while play.fleet.judged < 2:
        play.run(60)
        assert play.homes()["decode"] >= 1
        assert play.word.ready_in_s == {}
    assert play.now > 10 * 60.0
    play.run(600)
    assert play.homes() == {"prefill": 0, "decode": 0}


def test_workers_that_may_not_sleep_stay_however_long_nobody_asks() -> None:
    play = Play([10.0, 20.0], scaling={"idle_s": 60.0}).run(2 * HOUR_S)
    assert play.homes() == {"prefill": 1, "decode": 1}


# -- another mix of requests -------------------------------------------------------------------------


def shifted(*, flips: bool) -> Play:
    play = Play(
        poisson(steadily(1.2, 2 * HOUR_S)),
        shapes=lambda at: LONG_PROMPTS if at < HOUR_S else LONG_ANSWERS,
        begin=(6, 1),
        scaling={"flips": flips, "window_s": 120.0},
    )
    return play.run(HOUR_S)


def test_when_the_mix_shifts_workers_change_their_part_instead_of_being_started() -> None:
    started: dict[bool, int] = {}
    for flips in (True, False):
        play = shifted(flips=flips)
        before = play.fleet.starts
        flipped = play.fleet.turns
        play.run(HOUR_S)
        started[flips] = play.fleet.starts - before
        assert play.sizes["decode"][-1] > 2 * play.sizes["prefill"][-1]
        if flips:
            assert play.fleet.turns > flipped
            (why,) = {act["why"] for act in play.acts if (act["pool"], act["what"]) == ("decode", "flip")}
            assert why == "decode grows, and prefill has surplus replicas"
        else:
            assert play.fleet.turns == 0
            assert not any(act["what"] == "flip" for act in play.acts)
            assert play.word.roles == {}
    assert started[True] < started[False]


def test_routers_are_told_of_workers_that_do_another_part_than_their_pools() -> None:
    play = shifted(flips=True).run(1200)
    there = {each.worker_id: each.pool for each in play.fleet.observe()}
    assert play.word.roles
    for worker, role in play.word.roles.items():
        assert role is not ROLES[there[worker]]


def test_no_worker_is_lent_by_a_pool_that_would_have_fewer_than_its_bound() -> None:
    rates = np.concatenate([steadily(0.5, 1800), steadily(2.5, HOUR_S)])
    play = Play(poisson(rates), begin=(4, 4), bounds={"prefill": (1, 40), "decode": (4, 20)})
    play.run(1.5 * HOUR_S)
    assert min(play.sizes["decode"]) >= 4
    assert play.fleet.turns <= 4


# -- who has the last word ---------------------------------------------------------------------------


def test_advice_changes_nothing_and_says_what_would_be_done() -> None:
    play = Play(poisson(steadily(3.0, 1800)), begin=(9, 1), scaling={"mode": "advise"}).run(1800)
    assert play.homes() == {"prefill": 9, "decode": 1}
    assert (play.fleet.starts, play.fleet.turns) == (0, 0)
    assert play.acts
    assert not any(act["done"] for act in play.acts)
    assert not any(plan.applied for plan in play.word.pools.values())
    assert play.word.pools["decode"].desired > 1
    assert play.word.roles == {}


def test_advice_is_told_once_while_it_is_the_same() -> None:
    play = Play(poisson(steadily(1.5, 1800)), begin=(20, 10), scaling={"mode": "advise"}).run(1800)
    assert {act["pool"] for act in play.acts} == {"prefill", "decode"}
    for pool in ROLES:
        own = [(act["what"], act["count"]) for act in play.acts if act["pool"] == pool]
        assert all(one != other for one, other in itertools.pairwise(own))


def test_a_pin_wins_over_the_plan_until_it_is_taken_away() -> None:
    play = Play(poisson(steadily(1.5, HOUR_S))).run(600)
    planned = play.sizes["prefill"][-1]
    play.loop.pin("prefill", 12)
    play.run(300)
    assert play.sizes["prefill"][-1] == 12
    assert "pinned to 12" in play.pools["prefill"]["why"]
    assert play.explain["pins"] == {"prefill": 12}
    play.run(900)
    assert set(play.sizes["prefill"][-100:]) == {12}
    play.loop.pin("prefill", None)
    play.run(900)
    assert play.sizes["prefill"][-1] <= planned + 2
    assert play.explain["pins"] == {}


def test_a_pin_is_carried_out_where_the_plan_is_only_advice() -> None:
    play = Play(poisson(steadily(1.5, HOUR_S)), scaling={"mode": "advise"}).run(300)
    play.loop.pin("decode", 5)
    play.run(300)
    assert play.homes() == {"prefill": 4, "decode": 5}
    assert play.word.pools["decode"].applied
    assert not play.word.pools["prefill"].applied


@given(
    load=st.lists(st.tuples(st.sampled_from([0.0, 0.3, 1.0, 4.0]), st.booleans()), min_size=3, max_size=6),
    least=st.sampled_from([(1, 1), (2, 1), (3, 3)]),
    room=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    shape=st.sampled_from([USUAL, LONG_PROMPTS, LONG_ANSWERS]),
    slow=st.sampled_from([frozenset[int](), frozenset(range(7, 12))]),
)
def test_bounds_hold_whatever_comes(
    load: list[tuple[float, bool]],
    least: tuple[int, int],
    room: tuple[int, int],
    shape: RequestShape,
    slow: frozenset[int],
) -> None:
    bounds = {name: (low, low + more) for name, low, more in zip(ROLES, least, room, strict=True)}
    play = Play(
        poisson(np.concatenate([steadily(rate, 200) for rate, _ in load])),
        shapes=shape,
        kind=replace(KIND, never_ready=slow),
        begin=least,
        bounds=bounds,
        scaling={"start_timeout_s": 120.0},
    )
    for _, hears in load:
        play.run(200, hears=hears)
        for pool, (low, high) in bounds.items():
            assert play.homes()[pool] <= high
            assert all(low <= size <= high for size in play.sizes[pool])


# -- a day -------------------------------------------------------------------------------------------


def test_over_a_day_nearly_all_requests_get_their_level_for_less_than_a_fleet_for_its_peak() -> None:
    # Twelve times as fast as a day, and so are starts.
    crowd = LoadBurst(at_s=36_000.0, times=1.0, rise_s=1800.0, stays_s=3600.0, falls_s=1800.0)
    rates = Day(0.5, 3.0, 0.15, (crowd,)).rates(np.random.default_rng(3))
    times = poisson(rates.reshape(-1, 12).mean(axis=1), 3)
    length_s = len(rates) / 12
    kind = replace(KIND, start_s=20.0)

    def static(prefill: int) -> ScaledFleet:
        pools = {"prefill": (Role.PREFILL, prefill), "decode": (Role.DECODE, 2)}
        fleet = ScaledFleet(kind, LEVEL, pools, times, [USUAL] * len(times))
        fleet.run(length_s)
        fleet.end()
        return fleet

    play = Play(times, kind=kind, scaling={"start_s": 20.0})
    assert play.met_while(length_s) >= 0.99
    play.fleet.end()
    peak = next(fleet for size in range(6, 40) if (fleet := static(size)).met >= 0.99 * max(1, fleet.judged))
    assert play.fleet.paid_s < peak.paid_s
    assert play.explain["frozen"] is None
