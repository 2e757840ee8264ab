"""A statement adds up to the time of the workers, whatever was claimed of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvasir.ports.stores.costs import HOUR_S, CostGroup, CostRecords, WorkerHour, WorkSums
from kvasir_platform.gateway.costs.statement import (
    DIMENSIONS,
    CostStatement,
    pool_times,
    spent_by_hour,
    statement,
    worker_time,
)

HOUR = 1_900_000_800 // HOUR_S * HOUR_S
SHOP = CostGroup(HOUR, "decode", "shop", "key-1", "m", "fast")

seconds = st.floats(0.0, 1e5)
groups = st.builds(
    CostGroup,
    st.sampled_from([HOUR, HOUR + HOUR_S]),
    st.sampled_from(["prefill", "decode"]),
    st.sampled_from(["shop", "lab"]),
    st.sampled_from(["", "key-1"]),
    st.just("m"),
    st.sampled_from(["fast", "slow"]),
)
sums = st.builds(WorkSums, *[st.integers(0, 1000).map(float)] * 4, *[seconds] * 5)


@st.composite
def worker_hours(draw: st.DrawFn) -> WorkerHour:
    first, last = sorted((draw(st.floats(0, HOUR_S)), draw(st.floats(0, HOUR_S))))
    return WorkerHour(
        draw(st.sampled_from([HOUR, HOUR + HOUR_S])),
        draw(st.sampled_from(["prefill", "decode", "spare"])),
        draw(st.sampled_from(["w1", "w2"])),
        draw(st.sampled_from(["router-a", "router-b"])),
        first,
        last,
        draw(st.floats(0, HOUR_S)),
        draw(st.sampled_from([0.0, 1.0, 8.0])),
        draw(st.floats(0, 100)),
    )


def distinct(hours: Sequence[WorkerHour]) -> list[WorkerHour]:
    return list({each[:4]: each for each in hours}.values())


records = st.builds(
    CostRecords,
    st.dictionaries(groups, sums, max_size=12),
    st.lists(worker_hours(), max_size=12).map(distinct),
)


def total(made: CostStatement) -> tuple[float, float]:
    return sum(line.seconds for line in made.lines), sum(line.cost for line in made.lines)


@given(records, st.lists(st.sampled_from(DIMENSIONS), unique=True))
def test_all_lines_add_up_to_the_time_and_the_cost_of_the_workers(kept: CostRecords, by: list[str]) -> None:
    made = statement(kept, by)
    line_s, cost = total(made)
    assert math.isclose(line_s, made.device_s, rel_tol=1e-9, abs_tol=1e-6)
    assert math.isclose(cost, made.cost, rel_tol=1e-9, abs_tol=1e-6)
    times = pool_times(kept.workers).values()
    assert math.isclose(made.device_s, sum(time.device_s for time in times), rel_tol=1e-9, abs_tol=1e-6)


@given(records)
def test_no_line_is_negative_and_phases_add_up_to_the_usage(kept: CostRecords) -> None:
    for line in statement(kept, DIMENSIONS).lines:
        assert line.seconds >= -1e-6
        assert line.cost >= -1e-6
        phases = line.prefill_s + line.decode_s + line.kv_s + line.transfer_s
        if line.kind == "usage":
            assert math.isclose(phases, line.seconds, rel_tol=1e-9, abs_tol=1e-6)


@given(records)
def test_what_tenants_have_spent_is_the_cost_of_their_lines(kept: CostRecords) -> None:
    spent = sum(cost for costs in spent_by_hour(kept).values() for cost in costs.values())
    used = sum(line.cost for line in statement(kept, ["tenant"]).lines if line.kind == "usage")
    assert math.isclose(spent, used, rel_tol=1e-9, abs_tol=1e-6)


def test_busy_time_is_divided_by_claims_and_the_rest_is_idle() -> None:
    lab = SHOP._replace(tenant="lab")
    work = {SHOP: WorkSums(1, 10, 4, 5, decode=3.0), lab: WorkSums(1, 8, 0, 2, decode=1.0)}
    worker = WorkerHour(HOUR, "decode", "w", "router-a", 0.0, 100.0, 40.0, 2.0, 36.0)
    made = statement(CostRecords(work, [worker]), ["tenant"])
    assert [(line.kind, line.names["tenant"], round(line.seconds, 6)) for line in made.lines] == [
        ("usage", "shop", 60.0),
        ("usage", "lab", 20.0),
        ("idle", "", 120.0),
    ]
    assert [round(line.cost, 6) for line in made.lines] == [0.3, 0.1, 0.6]
    assert made.gpu_s == 200.0
    shop = made.lines[0]
    assert (shop.requests, shop.prompt_tokens, shop.cached_tokens, shop.output_tokens) == (1, 10, 4, 5)


def test_wasted_work_is_on_a_line_of_its_own_and_charged_to_nobody() -> None:
    work = {SHOP: WorkSums(1, 10, 0, 5, decode=3.0, wasted=1.0)}
    worker = WorkerHour(HOUR, "decode", "w", "router-a", 0.0, 10.0, 4.0, 0.0, 36.0)
    made = statement(CostRecords(work, [worker]), [])
    assert [(line.kind, line.seconds) for line in made.lines] == [
        ("usage", 3.0),
        ("wasted", 1.0),
        ("idle", 6.0),
    ]
    assert spent_by_hour(CostRecords(work, [worker]))[HOUR]["shop"] == 0.03


def test_a_worker_that_two_routers_saw_counts_once() -> None:
    near = WorkerHour(HOUR, "decode", "w", "router-a", 0.0, 1000.0, 500.0, 1.0, 1.0)
    far = near._replace(router="router-b", busy_s=500.0)
    present_s, busy_s = worker_time([near, far])
    assert present_s == 1000.0
    assert busy_s == 750.0


def test_a_router_that_follows_another_goes_on_where_it_ended() -> None:
    first = WorkerHour(HOUR, "decode", "w", "router-a", 0.0, 1000.0, 400.0, 1.0, 1.0)
    second = first._replace(router="router-b", first_s=1200.0, last_s=2200.0, busy_s=100.0)
    present_s, busy_s = worker_time([second, first])
    assert math.isclose(present_s, 2000.0)
    assert math.isclose(busy_s, 500.0)
