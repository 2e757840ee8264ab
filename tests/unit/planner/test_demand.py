"""Reports of routers are merged, with losses; the demand is unknown while a router is silent."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.demand import DemandReport, Traffic, WorkerStats
from kvasir.core.requests import Role
from kvasir_platform.planner.demand import FORGET_S, MIX_S, MOST_ROUTERS, Demand, Interval, Mix

STALE_S = 15.0


def report(
    sequence: int, *, router: str = "a", workers: tuple[WorkerStats, ...] = (), **counts: int
) -> DemandReport:
    return DemandReport(router, "e", sequence, {"m": Traffic(**counts)}, workers)


def worker(name: str, streams: int = 0) -> WorkerStats:
    return WorkerStats(name, "decode", Role.DECODE, True, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, streams)


@pytest.fixture
def demand() -> Demand:
    return Demand(STALE_S)


# -- traffic -----------------------------------------------------------------------------------------


def test_what_counts_is_added_up_and_what_does_not_is_as_it_is() -> None:
    before, after = Traffic(arrived=3, ended=2, waiting=9), Traffic(arrived=5, ended=2, waiting=4, parked=1)
    assert after.since(before) == Traffic(arrived=2, waiting=4, parked=1)
    assert after.plus(before) == Traffic(arrived=8, ended=4, waiting=13, parked=1)


def test_what_has_become_less_was_counted_anew_and_is_nothing() -> None:
    assert Traffic(arrived=1).since(Traffic(arrived=100)) == Traffic()


COUNTS = st.integers(0, 3)


@given(
    arrivals=st.lists(COUNTS, min_size=1, max_size=8),
    ways=st.data(),
)
def test_reports_that_are_lost_repeated_or_out_of_order_sum_to_the_same_traffic(
    arrivals: list[int], ways: st.DataObject
) -> None:
    totals = [sum(arrivals[: count + 1]) for count in range(len(arrivals))]
    told = [report(number + 1, arrived=total) for number, total in enumerate(totals)]
    between = ways.draw(st.lists(st.sampled_from(told), max_size=12))
    demand = Demand(STALE_S)
    demand.take(report(0), 0.0)
    demand.read(0.0)
    seen = 0
    for at, each in enumerate([*between, told[-1]], start=1):
        demand.take(each, float(at))
        if ways.draw(st.booleans()):
            seen += demand.read(float(at))["m"].traffic.arrived
    seen += demand.read(99.0)["m"].traffic.arrived
    assert seen == sum(arrivals)


def test_the_part_of_every_router_counts(demand: Demand) -> None:
    for router in "ab":
        demand.take(report(1, router=router, arrived=100), 0.0)
    assert demand.read(0.0) == {}
    demand.take(report(2, router="a", arrived=103, waiting=2), 10.0)
    demand.take(report(2, router="b", arrived=104, waiting=3), 10.0)
    assert demand.read(10.0) == {"m": Interval(10.0, Traffic(arrived=7, waiting=5))}


def test_what_a_router_counted_before_it_was_first_heard_is_of_no_interval(demand: Demand) -> None:
    demand.take(report(1), 0.0)
    demand.read(0.0)
    demand.take(report(500, router="late", arrived=10_000), 5.0)
    assert demand.read(10.0)["m"].traffic.arrived == 0
    demand.take(report(501, router="late", arrived=10_001), 15.0)
    assert demand.read(20.0)["m"] == Interval(10.0, Traffic(arrived=1))


def test_an_interval_counts_once_however_often_it_is_read(demand: Demand) -> None:
    demand.take(report(1), 0.0)
    demand.read(0.0)
    demand.take(report(2, arrived=5), 1.0)
    assert [demand.read(at)["m"].traffic.arrived for at in (2.0, 3.0)] == [5, 0]
    assert demand.read(3.0) == {}


def test_a_report_that_is_older_than_what_is_known_is_not_taken(demand: Demand) -> None:
    assert demand.take(report(7), 0.0)
    assert not demand.take(report(7), 1.0)
    assert not demand.take(report(6), 1.0)
    assert demand.take(report(8), 1.0)


def test_models_are_told_apart(demand: Demand) -> None:
    demand.take(DemandReport("a", "e", 1, {"m": Traffic(), "n": Traffic()}), 0.0)
    demand.read(0.0)
    demand.take(DemandReport("a", "e", 2, {"m": Traffic(arrived=1), "n": Traffic(arrived=2, parked=1)}), 1.0)
    read = demand.read(1.0)
    assert (read["m"].traffic.arrived, read["n"].traffic.arrived) == (1, 2)
    assert demand.asking() == {"m": 0, "n": 1}
    demand.take(DemandReport("a", "e", 3, {"m": Traffic(arrived=4), "n": Traffic(arrived=2)}), 2.0)
    assert demand.asking()["m"] == 3
    demand.read(2.0)
    assert demand.asking() == {"m": 0, "n": 0}


# -- what is not known -------------------------------------------------------------------------------


def test_without_a_router_the_load_is_not_known(demand: Demand) -> None:
    assert demand.missing(0.0) == "no router has reported yet"


def test_a_router_that_is_silent_is_named_until_it_speaks_or_is_forgotten(demand: Demand) -> None:
    demand.take(report(1, router="a"), 0.0)
    demand.take(report(1, router="b"), 0.0)
    assert demand.missing(STALE_S) is None
    demand.take(report(2, router="a"), STALE_S + 1)
    assert demand.missing(STALE_S + 1) == "no report from b for 16 s"
    demand.take(report(3, router="a"), FORGET_S + 1)
    assert demand.missing(FORGET_S + 1) is None


def test_a_router_that_was_forgotten_is_heard_again_from_whatever_it_counts(demand: Demand) -> None:
    demand.take(report(9, arrived=50), 0.0)
    assert demand.missing(FORGET_S + 1) == "no router has reported yet"
    demand.read(FORGET_S + 1)
    assert demand.take(report(1, arrived=70), FORGET_S + 2)
    assert demand.missing(FORGET_S + 2) is None
    assert demand.read(FORGET_S + 3)["m"].traffic.arrived == 0


def test_there_are_no_more_routers_than_can_be_kept_and_those_known_are_heard(demand: Demand) -> None:
    assert all(demand.take(report(1, router=f"r{n}"), 0.0) for n in range(MOST_ROUTERS))
    assert not demand.take(report(1, router="more"), 0.0)
    assert demand.take(report(2, router="r0"), 1.0)


def test_a_worker_is_as_the_router_sees_it_that_was_heard_last(demand: Demand) -> None:
    demand.take(report(1, router="b", workers=(worker("w", 2), worker("x"))), 5.0)
    demand.take(report(1, router="a", workers=(worker("w", 1),)), 1.0)
    assert {name: each.streams for name, each in demand.workers().items()} == {"w": 2, "x": 0}


# -- what requests are like --------------------------------------------------------------------------

ONE = Traffic(ended=1, prompt_tokens=100, computed_tokens=60, computed_squares=3600, output_tokens=10)


def mixed(*intervals: Interval) -> Mix:
    mix = Mix()
    for each in intervals:
        mix.take(each)
    return mix


def test_nothing_is_known_of_requests_before_one_has_ended() -> None:
    mix = mixed(Interval(10.0, Traffic(arrived=5)))
    assert not mix.known
    assert (mix.prompt_tokens, mix.computed_tokens, mix.output_tokens, mix.unevenness) == (0.0,) * 4
    assert mix.computed_share == 1.0


def test_a_mix_is_the_mean_of_what_ended() -> None:
    two = replace(ONE, prompt_tokens=300, computed_tokens=20, computed_squares=400, output_tokens=30)
    mix = mixed(Interval(1e-9, ONE), Interval(1e-9, two))
    assert mix.prompt_tokens == pytest.approx(200.0)
    assert mix.computed_tokens == pytest.approx(40.0)
    assert mix.computed_share == pytest.approx(0.2)
    assert mix.output_tokens == pytest.approx(20.0)
    # Costs of 60 and 20 vary by 20 around 40.
    assert mix.unevenness == pytest.approx(0.25)


def test_requests_that_are_alike_are_not_uneven() -> None:
    assert mixed(*[Interval(10.0, ONE)] * 3).unevenness == pytest.approx(0.0, abs=1e-9)


def test_what_was_long_ago_fades_and_while_nothing_ends_nothing_is_forgotten() -> None:
    long = replace(ONE, output_tokens=1000)
    faded = mixed(Interval(1.0, long), *[Interval(MIX_S, ONE)] * 6)
    assert faded.output_tokens == pytest.approx(10.0 + 990.0 * math.exp(-6) * (1 - math.exp(-1)), rel=0.05)
    kept = mixed(Interval(1.0, long), *[Interval(MIX_S, Traffic(arrived=1))] * 6)
    assert kept.output_tokens == 1000.0
