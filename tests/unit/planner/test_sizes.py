"""How work becomes a number of replicas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.requests import Role
from kvasir_platform.planner.capacity import Capacity
from kvasir_platform.planner.sizes import Bounds, TokenLoad, busy, needs, whole

EACH = Capacity(prompt_tokens_s=100.0, output_tokens_s=10.0, streams=8, spare=0.5, by="itl")
WORK = TokenLoad(prompt_tokens_s=250.0, output_tokens_s=5.0)


def pool(name: str, role: Role, most: int = 99, each: Capacity = EACH) -> tuple[Bounds, Capacity]:
    return Bounds(name, role, 0, most), each


@pytest.mark.parametrize(
    ("role", "replicas"), [(Role.PREFILL, 2.5), (Role.EMBED, 2.5), (Role.DECODE, 0.5), (Role.BOTH, 3.0)]
)
def test_work_keeps_replicas_busy_by_their_role(role: Role, replicas: float) -> None:
    assert busy(WORK, EACH, role) == replicas


def test_each_part_of_the_work_is_for_its_own_pool_with_what_keeps_waits_short() -> None:
    found = needs(WORK, [pool("p", Role.PREFILL), pool("d", Role.DECODE)])
    assert found == {"p": 3.0, "d": 1.0}


def test_without_work_nothing_is_kept_to_spare() -> None:
    assert needs(TokenLoad(0.0, 0.0), [pool("p", Role.PREFILL)]) == {"p": 0.0}


def test_what_the_first_pool_cannot_do_goes_to_the_next_of_its_role() -> None:
    pools = [pool("one", Role.PREFILL, most=1), pool("two", Role.PREFILL), pool("three", Role.PREFILL)]
    found = needs(WORK, pools)
    assert found["one"] == 3.0
    # Two thirds are left.
    assert found["two"] == pytest.approx(2.5 * 2 / 3 + 0.5)
    assert found["three"] == 0.0


def test_a_pool_that_is_off_leaves_everything_to_the_next() -> None:
    found = needs(WORK, [pool("off", Role.DECODE, most=0), pool("d", Role.DECODE)])
    assert found["d"] == 1.0


FIGURES = st.sampled_from([0.0, 0.5, 3.0, 1000.0])
CAPACITIES = st.builds(
    Capacity,
    prompt_tokens_s=st.sampled_from([0.5, 100.0]),
    output_tokens_s=st.sampled_from([0.5, 100.0]),
    streams=st.just(1),
    spare=st.sampled_from([0.0, 0.3, 2.0]),
    by=st.just("itl"),
)
POOLS = st.lists(
    st.tuples(st.sampled_from([Role.PREFILL, Role.DECODE]), st.integers(0, 9), CAPACITIES),
    min_size=1,
    max_size=4,
)


@given(FIGURES, FIGURES, POOLS)
def test_needs_are_enough_for_the_work_where_bounds_allow_it_and_in_the_order_of_the_file(
    prompts: float, outputs: float, drawn: list[tuple[Role, int, Capacity]]
) -> None:
    work = TokenLoad(prompts, outputs)
    pools = [pool(str(number), role, most, each) for number, (role, most, each) in enumerate(drawn)]
    found = needs(work, pools)
    assert list(found) == [bounds.name for bounds, _ in pools]
    for role in (Role.PREFILL, Role.DECODE):
        own = [(bounds, found[bounds.name]) for bounds, _ in pools if bounds.role is role]
        for number, (_, need) in enumerate(own):
            assert 0.0 <= need < math.inf
            # The next is asked for anything only where those before have their most.
            assert need == 0.0 or all(before > bounds.most for bounds, before in own[:number])


@given(FIGURES.filter(bool), POOLS)
def test_where_bounds_allow_it_replicas_can_do_all_of_the_work(
    prompts: float, drawn: list[tuple[Role, int, Capacity]]
) -> None:
    pools = [
        pool(str(number), Role.PREFILL, most, replace(each, spare=0.0))
        for number, (_, most, each) in enumerate(drawn)
    ]
    work = TokenLoad(prompts, 0.0)
    found = needs(work, pools)
    sized = [(min(found[bounds.name], bounds.most), bounds, each) for bounds, each in pools]
    done = sum(size * each.prompt_tokens_s for size, _, each in sized)
    if all(size == bounds.most for size, bounds, _ in sized):
        assert done <= prompts * (1 + 1e-9)
    else:
        assert done == pytest.approx(prompts)


@given(POOLS, FIGURES, st.sampled_from([0.0, 0.1, 5.0]))
def test_more_work_never_needs_fewer_replicas_in_all(
    drawn: list[tuple[Role, int, Capacity]], prompts: float, more: float
) -> None:
    pools = [pool(str(number), role, most, each) for number, (role, most, each) in enumerate(drawn)]
    less = needs(TokenLoad(prompts, 1.0), pools)
    grown = needs(TokenLoad(prompts + more, 1.0), pools)
    assert all(grown[name] >= less[name] - 1e-9 for name in less)


@pytest.mark.parametrize(
    ("need", "size"), [(0.0, 0), (1e-9, 0), (0.1, 1), (2.0, 2), (2.0000001, 2), (2.01, 3)]
)
def test_a_part_of_a_replica_is_a_whole_one_but_for_what_arithmetic_leaves(need: float, size: int) -> None:
    assert whole(need) == size
