"""The course of a rollout: its decisions, and what operators may order when."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.config.spec.traffic.routes import CanarySpec
from kvasir.core.errors import RequestError
from kvasir.core.requests import RouteArm
from kvasir.ports.router import RequestSummary
from kvasir_platform.gateway.traffic.outcomes import Outcome, PairedOutcomes, outcome_of
from kvasir_platform.gateway.traffic.rollout import (
    ACTIONS,
    Action,
    RolloutState,
    decide,
    decoded,
    encoded,
    ordered,
)

CANARY = CanarySpec(model="v2", steps=(0.1, 0.5), step_s=60, min_requests=100, timeout_s=1000)
RUNNING = RolloutState("running", run=1, step=0, since_s=1000.0)


def test_a_step_ends_after_its_time_and_its_requests() -> None:
    assert decide(CANARY, RUNNING, {"compared_0": 99}, 1100.0) is None
    assert decide(CANARY, RUNNING, {"compared_0": 100}, 1059.0) is None
    after = decide(CANARY, RUNNING, {"compared_0": 100}, 1060.0)
    assert after == RolloutState("running", 1, 1, 1060.0)
    assert after.share(CANARY) == 0.5
    # Requests of the step before do not count for this one.
    assert decide(CANARY, after, {"compared_0": 100, "compared_1": 99}, 2000.0) is None
    done = decide(CANARY, after, {"compared_0": 100, "compared_1": 100}, 1200.0)
    assert done is not None
    assert (done.phase, done.share(CANARY)) == ("promoted", 1.0)


@pytest.mark.parametrize("phase", ["running", "paused"])
@pytest.mark.parametrize("criterion", ["errors", "slo", "ttft", "itl"])
def test_a_worse_canary_is_rolled_back_and_the_reason_says_in_what(phase: Any, criterion: str) -> None:
    state = RolloutState(phase, 1, 0, 1000.0)
    after = decide(CANARY, state, {f"{criterion}_worse": 9, f"{criterion}_better": 0}, 1001.0)
    assert after is not None
    assert (after.phase, after.share(CANARY)) == ("rolled_back", 0.0)
    assert "9 of 9 comparisons" in after.reason
    assert decide(CANARY, state, {f"{criterion}_worse": 8, f"{criterion}_better": 0}, 1001.0) is None


def test_a_step_does_not_end_while_its_comparisons_lean_against_the_canary() -> None:
    leaning = {"compared_0": 100, "itl_worse": 62, "itl_better": 38}
    assert decide(CANARY, RUNNING, leaning, 1100.0) is None
    assert decide(CANARY, RUNNING, {**leaning, "itl_worse": 50, "itl_better": 50}, 1100.0) is not None
    after = decide(CANARY, RUNNING, leaning, 2001.0)
    assert after is not None
    assert (after.phase, after.reason) == (
        "paused",
        "after 1000 s it is undecided whether its time between tokens is longer",
    )
    # A single failure among many requests is no reason to wait.
    assert decide(CANARY, RUNNING, {"compared_0": 100, "errors_worse": 1}, 1100.0) is not None


def test_a_step_without_requests_is_paused_in_the_end() -> None:
    after = decide(CANARY, RUNNING, {"compared_0": 3}, 2001.0)
    assert after is not None
    assert (after.phase, after.reason) == ("paused", "3 of 100 requests were compared within 1000 s")
    assert after.share(CANARY) == 0.1


def test_states_survive_their_storage_and_what_cannot_be_read_serves_no_canary() -> None:
    assert decoded(encoded(RUNNING)) == RUNNING
    assert decoded(b"") == decoded(b"{") == decoded(b'{"phase":"maybe"}') == RolloutState()
    assert RolloutState().share(CANARY) == 0.0


@pytest.mark.parametrize(
    ("phase", "allowed"),
    [
        ("idle", {"start": "running", "promote": "promoted"}),
        ("running", {"pause": "paused", "promote": "promoted", "abort": "rolled_back"}),
        ("paused", {"start": "running", "promote": "promoted", "abort": "rolled_back"}),
        ("promoted", {"undo": "rolled_back"}),
        ("rolled_back", {"start": "running", "promote": "promoted"}),
    ],
)
def test_operators_may_order_what_the_phase_allows(phase: Any, allowed: dict[Action, str]) -> None:
    state = RolloutState(phase, 3, 1, 1.0)
    for action in ACTIONS:
        if action in allowed:
            assert ordered(state, action, 9.0).phase == allowed[action]
        else:
            with pytest.raises(RequestError, match="applies to one that is") as caught:
                ordered(state, action, 9.0)
            assert caught.value.code == "rollout_state"


def test_a_paused_rollout_goes_on_where_it_was_and_another_start_is_a_new_run() -> None:
    assert ordered(RolloutState("paused", 3, 1, 1.0), "start", 9.0) == RolloutState("running", 3, 1, 9.0)
    assert ordered(RolloutState("rolled_back", 3, 1, 1.0), "start", 9.0) == RolloutState("running", 4, 0, 9.0)


def test_outcomes_are_compared_in_pairs() -> None:
    comparison = PairedOutcomes(slowdown=1.1)
    good = Outcome(False, True, 0.1, 0.01)
    comparison.add(good, canary=False, step=0)
    comparison.add(good, canary=False, step=0)
    comparison.add(Outcome(False, True, 0.105, 0.02), canary=True, step=0)
    comparison.add(Outcome(True, False), canary=True, step=0)
    counts = comparison.take()
    assert counts["compared_0"] == 2
    assert (counts["ttft_better"], counts["itl_worse"]) == (1, 1)
    assert (counts["errors_worse"], counts["slo_worse"]) == (1, 1)
    assert (counts["canary_requests"], counts["canary_failed"], counts["stable_requests"]) == (2, 1, 2)
    assert comparison.take() == {}


def test_a_canary_waits_for_its_partner_too_and_few_outcomes_wait() -> None:
    comparison = PairedOutcomes(slowdown=1.0)
    for _ in range(1000):
        comparison.add(Outcome(False), canary=True, step=0)
    for _ in range(1000):
        comparison.add(Outcome(False), canary=False, step=0)
    assert comparison.take()["compared_0"] == 64


@pytest.mark.parametrize(
    ("code", "counted"),
    [
        ("worker_lost", True),
        ("no_capacity", True),
        ("context_length_exceeded", False),
        ("client_closed", False),
    ],
)
def test_only_what_the_server_is_at_fault_for_counts(code: str, counted: bool) -> None:
    summary = RequestSummary("r", "v2", code, 0.0, 1.0, route_arm=RouteArm("chat", "v2"))
    assert outcome_of(summary) == (Outcome(True, False) if counted else None)
