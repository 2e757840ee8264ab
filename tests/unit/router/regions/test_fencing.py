"""A request is not executed in two cells at a time, in whatever direction their link breaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_router.regions.fencing import ExecutorFence, FenceRules, OriginFence

RULES = FenceRules()
STEP_S = 0.05


@given(
    st.floats(0.0, 8.0),
    st.floats(0.0, 8.0),
    st.floats(0.0, 3.0),
    st.floats(0.0, RULES.delay_s),
    st.floats(0.0, RULES.delay_s),
)
def test_the_executor_has_stopped_before_the_origin_repeats(
    cut_to_s: float, cut_back_s: float, heals_after_s: float, to_s: float, back_s: float
) -> None:
    origin, executor = OriginFence(RULES, 0.0), ExecutorFence(RULES, 0.0)
    to_executor: list[float] = []
    to_origin: list[float] = []
    stopped = repeated = False

    def passes(cut_s: float, now: float) -> bool:
        return not cut_s <= now < cut_s + heals_after_s + 3.0

    for step in range(int(16 / STEP_S)):
        now = step * STEP_S
        for _ in [at for at in to_executor if at <= now]:
            executor.heard(now)
        to_executor = [at for at in to_executor if at > now]
        stopped = executor.stops(now)
        for _ in [at for at in to_origin if at <= now]:
            origin.heard(now)
        to_origin = [at for at in to_origin if at > now]
        if step % 5 == 0:
            if origin.beat(now) and passes(cut_to_s, now):
                to_executor.append(now + to_s)
            if not stopped and passes(cut_back_s, now):
                to_origin.append(now + back_s)
        repeated = origin.may_repeat(now)
        assert stopped or not repeated
    assert repeated


def test_a_request_runs_again_within_three_seconds() -> None:
    origin = OriginFence(RULES, 0.0)
    assert not origin.gives_up(RULES.quiet_s)
    assert origin.beat(0.75)
    assert origin.gives_up(0.95)
    assert not origin.beat(1.0)
    assert not origin.may_repeat(2.5)
    assert origin.may_repeat(2.56)
    assert RULES.longest_s < 3.0


def test_output_that_comes_after_giving_up_is_not_used() -> None:
    origin = OriginFence(RULES, 0.0)
    assert origin.gives_up(1.0)
    origin.heard(1.1)
    assert origin.gives_up(1.2)


def test_a_stopped_execution_does_not_go_on() -> None:
    executor = ExecutorFence(RULES, 0.0)
    assert executor.stops(1.3)
    executor.heard(1.3)
    assert executor.stops(1.35)


def test_heartbeats_are_more_frequent_than_what_they_hold_off() -> None:
    with pytest.raises(ValueError, match="heartbeat_s"):
        FenceRules(heartbeat_s=1.0)
