"""The fleet in virtual time: requests take the right time, and replicas cost until they exit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.errors import ConfigError
from kvasir.core.requests import Role
from kvasir.ports.scaler import ReplicaState
from kvasir_platform.sim.scaling.days import Day, LoadBurst, RequestShape, arrivals, crowds, drawn
from kvasir_platform.sim.scaling.fleet import Kind, ScaledFleet, SimSlo

STARTING, SERVING, LEAVING = ReplicaState
# A prompt of a thousand takes a second, a step of one stream a tenth.
KIND = Kind(
    prefill_fixed_s=0.0,
    prefill_token_s=0.001,
    prefill_context_s=0.0,
    step_fixed_s=0.09,
    step_stream_s=0.01,
    step_kv_token_s=0.0,
    kv_tokens=100_000,
    most_streams=4,
    start_s=30.0,
)
ONE = RequestShape(prompt=1000, computed=1000, output=10)
LEVEL = SimSlo(ttft_s=1.5, itl_s=0.2)
POOLS = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 1)}


def fleet(
    *times: float,
    shape: RequestShape = ONE,
    kind: Kind = KIND,
    level: SimSlo = LEVEL,
    pools: dict[str, tuple[Role, int]] | None = None,
) -> ScaledFleet:
    return ScaledFleet(kind, level, POOLS if pools is None else pools, times, [shape] * len(times))


def of(found: ScaledFleet, pool: str) -> list[tuple[str, ReplicaState]]:
    return [(each.replica_id, each.state) for each in found.observe() if each.pool == pool]


# -- requests ----------------------------------------------------------------------------------------


def test_a_request_is_computed_handed_over_and_generated() -> None:
    found = fleet(10.0)
    found.run(10.9)
    assert found.report().models["model"].in_flight == 1
    found.run(11.9)
    assert found.report().workers[1].streams == 1
    found.run(13.0)
    traffic = found.report().models["model"]
    assert (traffic.in_flight, traffic.judged, traffic.met) == (0, 1, 1)
    assert (traffic.arrived, traffic.arrived_tokens, traffic.ended) == (1, 1000, 1)


def test_prompts_wait_in_one_line_and_whoever_waits_too_long_is_late() -> None:
    found = fleet(10.0, 10.0, 10.0)
    found.run(10.5)
    traffic = found.report().models["model"]
    assert (traffic.waiting, traffic.waiting_tokens, traffic.parked) == (2, 2000, 0)
    found.run(30.0)
    assert (found.judged, found.met) == (3, 1)


def test_a_long_prompt_costs_what_its_attention_does_and_what_is_cached_costs_nothing() -> None:
    kind = replace(KIND, prefill_context_s=1e-6)
    assert kind.prefill_s(RequestShape(1000, 1000, 1)) == pytest.approx(1.5)
    assert kind.prefill_s(RequestShape(1000, 500, 1)) == pytest.approx(0.5 + 0.375)


def test_streams_of_a_replica_advance_together_the_slower_the_more_there_are() -> None:
    slow = fleet(
        *[10.0 + second for second in range(4)], level=SimSlo(9.0, 0.105), shape=ONE._replace(output=99)
    )
    slow.run(100.0)
    assert (slow.judged, slow.met) == (4, 0)
    alone = fleet(10.0, level=SimSlo(9.0, 0.105), shape=ONE._replace(output=99))
    alone.run(100.0)
    assert alone.met == 1


@pytest.mark.parametrize(
    "kind", [replace(KIND, most_streams=1), replace(KIND, kv_tokens=1500)], ids=["seats", "memory"]
)
def test_a_stream_that_finds_no_room_waits_for_one_to_end(kind: Kind) -> None:
    found = fleet(10.0, 11.0, kind=kind, shape=ONE._replace(output=100))
    found.run(13.0)
    assert [each.streams for each in found.report().workers] == [0, 1]
    assert found.report().models["model"].waiting == 1
    found.run(60.0)
    assert found.judged == 2


def test_without_any_replica_requests_are_parked() -> None:
    found = fleet(10.0, pools={name: (role, 0) for name, (role, _) in POOLS.items()})
    found.run(11.0)
    assert found.report().models["model"].parked == 1
    found.end()
    assert found.judged == 0
    found.run(20.0)
    found.end()
    assert (found.judged, found.met) == (1, 0)


# -- replicas ----------------------------------------------------------------------------------------


def test_a_replica_serves_after_its_start_and_is_paid_for_from_when_it_was_asked_for() -> None:
    found = fleet()
    found.run(100.0)
    found.start("prefill", 1)
    found.run(129.0)
    assert [state for _, state in of(found, "prefill")] == [SERVING, STARTING]
    found.run(130.0)
    assert [state for _, state in of(found, "prefill")] == [SERVING, SERVING]
    found.end()
    assert found.paid_s == pytest.approx(2 * 130.0 + 30.0)


@pytest.mark.parametrize("count", [1, 3])
def test_those_whose_start_does_not_end_are_told_by_the_order_of_asking(count: int) -> None:
    found = fleet(kind=replace(KIND, never_ready=frozenset({4})))
    for _ in range(3 // count):
        found.start("prefill", count)
    found.run(1000.0)
    assert [state for _, state in of(found, "prefill")] == [SERVING, SERVING, STARTING, SERVING]


def test_a_replica_that_leaves_ends_its_prompt_and_takes_no_other() -> None:
    found = fleet(10.0, 10.0)
    found.run(10.5)
    found.start("prefill", 1)
    found.retire("prefill", ["prefill-1"])
    assert of(found, "prefill")[0] == ("prefill-1", LEAVING)
    found.run(11.5)
    assert [name for name, _ in of(found, "prefill")] == ["prefill-3"]
    assert found.report().models["model"].waiting == 1
    found.run(60.0)
    assert found.judged == 2


def test_what_a_replica_that_leaves_still_does_is_in_flight() -> None:
    found = fleet(10.0, shape=ONE._replace(output=100))
    found.run(12.0)
    found.retire("decode", ["decode-2"])
    assert found.report().models["model"].in_flight == 1


def test_one_that_was_stopped_while_it_started_does_not_come_later() -> None:
    found = fleet(100.0, 100.0)
    found.start("prefill", 1)
    found.retire("prefill", ["prefill-3"])
    found.run(100.5)
    assert of(found, "prefill") == [("prefill-1", SERVING)]
    assert found.report().models["model"].waiting == 1


def test_an_unknown_pool_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="there is no pool embed; there are prefill, decode"):
        fleet().start("embed", 1)


# -- roles -------------------------------------------------------------------------------------------


def test_a_worker_that_decodes_instead_gets_no_prompt_and_the_reverse() -> None:
    found = fleet(10.0, 10.0, pools={"prefill": (Role.PREFILL, 2), "decode": (Role.DECODE, 1)})
    found.assign({"prefill-2": Role.DECODE})
    found.run(10.5)
    assert found.report().models["model"].waiting == 1
    assert [each.role for each in found.report().workers] == [Role.PREFILL, Role.DECODE, Role.DECODE]
    assert found.turns == 1
    found.assign({})
    assert found.report().models["model"].waiting == 0
    assert found.turns == 2


def test_what_runs_on_a_worker_ends_where_it_is() -> None:
    pools = {"prefill": (Role.PREFILL, 1), "decode": (Role.DECODE, 2)}
    found = fleet(10.0, 12.0, shape=ONE._replace(output=100), pools=pools)
    found.run(11.5)
    (busy,) = [each.worker_id for each in found.report().workers if each.streams]
    found.assign({busy: Role.PREFILL})
    found.run(100.0)
    assert found.judged == 2
    assert found.report().models["model"].in_flight == 0


# -- histories ---------------------------------------------------------------------------------------

ACTS = st.one_of(
    st.tuples(st.just("start"), st.sampled_from(["prefill", "decode"]), st.integers(1, 2)),
    st.tuples(st.just("retire"), st.sampled_from(["prefill", "decode"]), st.integers(0, 3)),
    st.tuples(st.just("assign"), st.sampled_from(["prefill", "decode"]), st.integers(0, 3)),
)


@given(st.lists(st.tuples(st.sampled_from([0.5, 7.0, 40.0]), ACTS), max_size=15))
def test_whatever_is_asked_for_no_request_is_lost_and_every_second_is_paid(
    history: list[tuple[float, tuple[str, str, int]]],
) -> None:
    found = fleet(*np.arange(1.0, 60.0, 1.5).tolist())
    for seconds, (what, pool, number) in history:
        found.run(found.now + seconds)
        own = [each.replica_id for each in found.observe() if each.pool == pool]
        if what == "start":
            found.start(pool, number)
        elif what == "retire":
            found.retire(pool, own[number : number + 1])
        else:
            other = Role.DECODE if pool == "prefill" else Role.PREFILL
            found.assign(dict.fromkeys(own[:number], other))
        traffic = found.report().models["model"]
        assert traffic.arrived == traffic.judged + traffic.in_flight
    # Whatever it was, with one more of each all ends.
    found.assign({})
    for pool in POOLS:
        found.start(pool, 1)
    found.run(found.now + 1000.0)
    assert (found.judged, found.report().models["model"].in_flight) == (40, 0)
    assert LEAVING not in {each.state for each in found.observe()}
    paid = found.paid_s
    found.end()
    assert found.paid_s - paid > 0.0
    paid = found.paid_s
    found.end()
    assert found.paid_s == paid


# -- days --------------------------------------------------------------------------------------------


def test_a_day_is_slow_at_four_in_the_morning_and_busy_at_four_in_the_afternoon() -> None:
    rates = Day(least=1.0, most=9.0, noise=0.0).rates(np.random.default_rng(1))
    hours = rates.reshape(24, 3600).mean(axis=1)
    assert hours.argmin() in range(2, 6)
    assert hours.argmax() in range(13, 18)
    assert rates.min() >= 1.0
    assert rates.max() <= 9.0


def test_a_crowd_rises_stays_and_falls_off() -> None:
    crowd = LoadBurst(at_s=100.0, times=2.0, rise_s=10.0, stays_s=50.0, falls_s=20.0)
    at = np.array([99.0, 105.0, 110.0, 160.0, 180.0, 1000.0])
    assert crowd.factor(at) == pytest.approx([0.0, 1.0, 2.0, 2.0, 2.0 / np.e, 0.0])


def test_noise_has_no_part_in_how_much_comes_in_all() -> None:
    day = Day(5.0, 5.0, noise=0.2)
    assert day.rates(np.random.default_rng(1)).mean() == pytest.approx(5.0, rel=0.05)


def test_a_seed_is_a_whole_day() -> None:
    def made(seed: int) -> tuple[list[float], list[RequestShape]]:
        rng = np.random.default_rng(seed)
        times = arrivals(Day(0.1, 0.5, 0.2, crowds(2, rng)).rates(rng), rng)
        return times.tolist(), drawn([ONE, LONG], len(times), rng)

    assert made(1) == made(1)
    assert made(1) != made(2)
    times, shapes = made(1)
    assert times == sorted(times)
    assert len(shapes) == len(times)
    assert set(shapes) == {ONE, LONG}


LONG = RequestShape(5000, 4000, 100)
