"""KV that is handed off while the prompt is still computed, and failed pulls."""

from __future__ import annotations

import pytest

from kvasir.config.spec.deployment import HealthSpec
from kvasir.core.requests import Delta, FinishReason, Leg, Role, Timings, Usage
from kvasir_router.requests.events import (
    AbortOn,
    Effect,
    EmitDelta,
    Event,
    FailRequest,
    FinishRequest,
    ReleaseOn,
    RequestCancelled,
    SubmitTo,
    TimerTick,
    WorkerDraining,
    WorkerInterrupted,
    WorkerLost,
    WorkerRestored,
)

from .test_machine import Stage, handoff_of, has, only

RELEASED = ReleaseOn("p0", ("lease-r",))


def overlap(stage: Stage, *more: str) -> str:
    """A request that p0 computes while its KV is pulled; `more` decode workers join. Returns the puller."""
    stage.ready(**dict.fromkeys(more, Role.DECODE))
    stage.arrive()
    return only(stage.offered("p0"), SubmitTo).worker_id


def failed(code: str, name: str = "r") -> Delta:
    return Delta(name, 0, finish=FinishReason.ERROR, last=True, error=code)


def running(stage: Stage) -> dict[str, int]:
    workers = stage.machine.fleet.workers.values()
    return {worker.worker_id: len(worker.legs) for worker in workers if worker.legs}


def test_an_early_offer_starts_the_decode_leg_beside_the_prefill_leg(stage: Stage) -> None:
    stage.arrive()
    effects = stage.offered("p0")
    decode = only(effects, SubmitTo)
    assert (decode.worker_id, decode.request.leg) == ("d0", Leg.DECODE)
    assert decode.request.handoff == handoff_of("r")
    assert not has(effects, AbortOn)
    assert running(stage) == {"p0": 1, "d0": 1}
    assert {target.worker_id for target in stage.machine.fleet.accounted()} == {"p0", "d0"}
    accounting = stage.machine.accounting()
    assert (accounting.running, accounting.accounted, accounting.leases) == (1, 1, 1)


def test_the_end_of_the_prefill_leg_settles_its_accounts_and_nothing_else(stage: Stage) -> None:
    overlap(stage)
    stage.now = 3.0
    assert stage.prefilled("p0", cached=8) == []
    assert {target.worker_id for target in stage.machine.fleet.accounted()} == {"d0"}
    assert stage.machine.leases == 1
    stage.now = 4.0
    assert only(stage.say("d0", Delta("r", 0, (7,))), ReleaseOn) == RELEASED
    end = Delta("r", 1, (8,), finish=FinishReason.STOP, last=True, usage=Usage(20, 0, 19, 1900, 2))
    summary = only(stage.say("d0", end), FinishRequest).summary
    assert (summary.prefill_done_s, summary.first_token_s, summary.usage.cached_tokens) == (3.0, 4.0, 8)


def test_a_second_early_offer_changes_nothing(stage: Stage) -> None:
    overlap(stage)
    assert stage.offered("p0") == []


def test_a_token_that_comes_before_the_prompt_is_computed_ends_the_prefill_leg(stage: Stage) -> None:
    overlap(stage)
    effects = stage.say("d0", Delta("r", 0, (7,)))
    assert only(effects, AbortOn) == AbortOn("p0", ("r",))
    assert only(effects, ReleaseOn) == RELEASED
    assert only(effects, EmitDelta).delta.token_ids == (7,)
    assert {target.worker_id for target in stage.machine.fleet.accounted()} == {"d0"}
    end = Delta("r", 1, (8,), finish=FinishReason.STOP, last=True, usage=Usage(20, 4, 0, 0, 2))
    summary = only(stage.say("d0", end), FinishRequest).summary
    assert (summary.prefill_done_s, summary.usage.cached_tokens) == (None, 4)
    # Of the worker that was to compute it nothing is known: neither its hit, nor that it serves well.
    status = stage.machine.fleet.kv_status("p0")
    assert status is not None
    assert status.evaluated_requests == 0


@pytest.mark.parametrize("computed", [True, False])
def test_a_first_token_speaks_well_of_the_workers_that_brought_it_about(stage: Stage, computed: bool) -> None:
    health = stage.machine.fleet.health
    overlap(stage)
    for worker_id in ("p0", "d0"):
        for _ in range(HealthSpec().consecutive_failures - 1):
            health.failed(worker_id, "worker_failed", stage.now)
    if computed:
        stage.prefilled("p0")
    stage.say("d0", Delta("r", 0, (7,)))
    for worker_id in ("p0", "d0"):
        health.failed(worker_id, "worker_failed", stage.now)
    ejections = {worker_id: health.view(worker_id, stage.now).ejections for worker_id in ("p0", "d0")}
    assert ejections == {"p0": 0 if computed else 1, "d0": 0}


def test_a_prefill_leg_that_fails_takes_the_decode_leg_with_it(stage: Stage) -> None:
    stage.ready(p1=Role.PREFILL)
    first = only(stage.arrive(), SubmitTo).worker_id
    decode = only(stage.offered(first), SubmitTo).worker_id
    effects = stage.say(first, failed("worker_failed"))
    assert only(effects, AbortOn) == AbortOn(decode, ("r",))
    assert only(effects, ReleaseOn) == ReleaseOn(first, ("lease-r",))
    again = only(effects, SubmitTo)
    assert {first, again.worker_id} == {"p0", "p1"}
    assert again.request.leg is Leg.PREFILL


@pytest.mark.parametrize("offered", [True, False])
def test_a_prefill_worker_that_is_lost_takes_the_decode_leg_with_it(stage: Stage, offered: bool) -> None:
    stage.ready(p1=Role.PREFILL)
    first = only(stage.arrive(), SubmitTo).worker_id
    if offered:
        stage.offered(first)
    effects = stage.tell(WorkerLost(first, "gone"))
    assert [effect.worker_id for effect in effects if isinstance(effect, AbortOn)] == ["d0"] * offered
    assert not has(effects, ReleaseOn)
    assert only(effects, SubmitTo).worker_id != first


def test_a_prefill_worker_that_stays_silent_is_left_with_both_legs(stage: Stage) -> None:
    stage.ready(p1=Role.PREFILL)
    first = only(stage.arrive(), SubmitTo).worker_id
    stage.offered(first)
    stage.tell(WorkerInterrupted(first))
    stage.now = 0.5
    effects = stage.tell(TimerTick())
    aborted = {effect.worker_id for effect in effects if isinstance(effect, AbortOn)}
    assert aborted == {first, "d0"}
    assert only(effects, ReleaseOn) == ReleaseOn(first, ("lease-r",))
    assert only(effects, SubmitTo).worker_id != first


@pytest.mark.parametrize("worker_id", ["p0", "d0"])
def test_a_worker_that_drains_brings_both_legs_to_their_end(stage: Stage, worker_id: str) -> None:
    overlap(stage)
    assert stage.tell(WorkerDraining(worker_id, "upgrade")) == []
    assert stage.prefilled("p0") == []
    done = Delta("r", 0, (7,), finish=FinishReason.STOP, last=True, usage=Usage(20, 0, 19, 1900, 1))
    assert has(stage.say("d0", done), FinishRequest)


@pytest.mark.parametrize("how", ["fails", "is lost", "is silent"])
def test_a_decode_leg_that_ends_too_soon_goes_on_elsewhere_with_the_same_kv(stage: Stage, how: str) -> None:
    puller = overlap(stage, "d1")
    match how:
        case "fails":
            effects = stage.say(puller, failed("worker_failed"))
        case "is lost":
            effects = stage.tell(WorkerLost(puller, "gone"))
        case _:
            stage.tell(WorkerInterrupted(puller))
            stage.now = 0.5
            effects = stage.tell(TimerTick())
    decode = only(effects, SubmitTo)
    assert (decode.request.leg, decode.request.handoff) == (Leg.DECODE, handoff_of("r"))
    assert {puller, decode.worker_id} == {"d0", "d1"}
    assert not has(effects, ReleaseOn)
    assert running(stage).keys() == {"p0", decode.worker_id}
    assert stage.prefilled("p0") == []
    assert has(stage.say(decode.worker_id, Delta(decode.request.request_id, 0, (7,))), EmitDelta)


@pytest.mark.parametrize("lost", [True, False])
def test_without_another_place_the_kv_waits_for_the_end_of_the_prefill_leg(stage: Stage, lost: bool) -> None:
    overlap(stage)
    effects = stage.tell(WorkerLost("d0", "gone")) if lost else stage.say("d0", failed("worker_failed"))
    assert effects == []
    assert running(stage) == {"p0": 1}
    if lost:
        stage.ready(d1=Role.DECODE)
    decode = only(stage.prefilled("p0"), SubmitTo)
    assert (decode.request.leg, decode.worker_id) == (Leg.DECODE, "d1" if lost else "d0")


def test_an_early_offer_waits_while_the_decode_worker_takes_nothing(stage: Stage) -> None:
    stage.arrive()
    stage.tell(WorkerDraining("d0", "upgrade"))
    assert stage.offered("p0") == []
    assert stage.machine.leases == 1
    stage.tell(WorkerRestored("d0"))
    assert only(stage.prefilled("p0"), SubmitTo).request.leg is Leg.DECODE


def test_an_early_offer_goes_to_another_decode_worker_than_was_planned(stage: Stage) -> None:
    stage.arrive()
    stage.ready(d1=Role.DECODE)
    stage.tell(WorkerDraining("d0", "upgrade"))
    assert only(stage.offered("p0"), SubmitTo).worker_id == "d1"
    assert {target.worker_id for target in stage.machine.fleet.accounted()} == {"p0", "d1"}


@pytest.mark.parametrize("event", [RequestCancelled("r"), TimerTick()])
def test_an_end_from_outside_aborts_both_legs_and_releases_the_lease(stage: Stage, event: Event) -> None:
    stage.arrive(deadline_s=5.0)
    stage.offered("p0")
    stage.now = 6.0
    effects = stage.tell(event)
    assert {effect for effect in effects if isinstance(effect, AbortOn)} == {
        AbortOn("p0", ("r",)),
        AbortOn("d0", ("r",)),
    }
    assert only(effects, ReleaseOn) == RELEASED
    assert stage.machine.in_flight == 0


def test_kv_that_is_offered_early_for_nobody_is_released_at_once(stage: Stage) -> None:
    stage.arrive()
    stage.tell(RequestCancelled("r"))
    assert only(stage.offered("p0"), ReleaseOn) == RELEASED


def test_a_prompt_of_which_nothing_comes_is_taken_back_from_both_workers(stage: Stage) -> None:
    stage.ready(p1=Role.PREFILL, d1=Role.DECODE)
    first = only(stage.arrive(), SubmitTo).worker_id
    stage.offered(first)
    effects: list[Effect] = []
    while not has(effects, AbortOn) and stage.now < 100.0:
        stage.now += 1.0
        effects = stage.tell(TimerTick())
    assert len([effect for effect in effects if isinstance(effect, AbortOn)]) == 2
    assert only(effects, SubmitTo).worker_id != first


@pytest.mark.parametrize("computed", [True, False])
def test_a_pull_that_failed_is_tried_on_one_other_worker_and_then_the_prompt_again(
    stage: Stage, computed: bool
) -> None:
    stage.ready(p1=Role.PREFILL, d1=Role.DECODE, d2=Role.DECODE)
    source = only(stage.arrive(), SubmitTo).worker_id
    puller = only(stage.offered(source), SubmitTo).worker_id
    if computed:
        stage.prefilled(source)
    effects = stage.say(puller, failed("transfer_failed"))
    other = only(effects, SubmitTo)
    assert (other.request.leg, other.request.handoff) == (Leg.DECODE, handoff_of("r"))
    assert other.worker_id != puller
    assert not has(effects, ReleaseOn)
    effects = stage.say(other.worker_id, failed("transfer_failed", other.request.request_id))
    assert only(effects, ReleaseOn) == ReleaseOn(source, ("lease-r",))
    again = only(effects, SubmitTo)
    assert again.request.leg is Leg.PREFILL
    assert again.worker_id != source
    name = again.request.request_id
    decode = only(stage.prefilled(again.worker_id, name), SubmitTo)
    failure = only(
        stage.say(decode.worker_id, failed("transfer_failed", decode.request.request_id)), FailRequest
    )
    assert (failure.error.code, failure.summary.retries) == ("transfer_failed", 2)


def test_a_pull_that_failed_is_not_forgotten_when_the_prompt_is_computed(stage: Stage) -> None:
    first = overlap(stage, "d1", "d2")
    second = only(stage.say(first, failed("transfer_failed")), SubmitTo)
    stage.prefilled("p0")
    effects = stage.say(second.worker_id, failed("transfer_failed", second.request.request_id))
    assert only(effects, SubmitTo).request.leg is Leg.PREFILL


def test_a_pull_that_failed_on_the_only_decode_worker_costs_a_new_start(stage: Stage) -> None:
    stage.arrive()
    stage.prefilled("p0")
    effects = stage.say("d0", failed("transfer_failed"))
    assert only(effects, ReleaseOn) == RELEASED
    assert only(effects, SubmitTo).request.leg is Leg.PREFILL


def test_kv_whose_lease_has_ended_is_not_pulled_again(stage: Stage) -> None:
    stage.ready(d1=Role.DECODE)
    stage.arrive()
    puller = only(stage.prefilled("p0"), SubmitTo).worker_id
    stage.now = 20.0
    assert only(stage.say(puller, failed("transfer_failed")), SubmitTo).request.leg is Leg.PREFILL


def test_the_time_for_which_a_pull_waited_for_the_prompt_is_no_cost_of_the_transfer(stage: Stage) -> None:
    overlap(stage)
    stage.now = 8.0
    stage.prefilled("p0")
    usage, timings = Usage(20, 0, 19, 1 << 24, 1), Timings(queue_s=0.5, transfer_s=8.0)
    stage.now = 9.0
    done = Delta("r", 0, (7,), finish=FinishReason.STOP, last=True, usage=usage, timings=timings)
    assert only(stage.say("d0", done), FinishRequest).summary.transfer_s == 8.0
    rates = stage.rates.rates("d0")
    assert rates.transfer_fixed_s + rates.transfer_byte_s * (1 << 24) == pytest.approx(0.5, rel=0.3)


def test_the_wait_for_tiers_is_told_wherever_it_was(stage: Stage) -> None:
    stage.arrive()
    waited = Delta(
        "r", 0, (1,), finish=FinishReason.LENGTH, last=True, usage=Usage(20, 8, 0, 0, 1),
        timings=Timings(prefill_s=0.1, tier_s=0.5), handoff=handoff_of("r"),
    )  # fmt: skip
    stage.say("p0", waited)
    end = Delta(
        "r", 0, (7,), finish=FinishReason.STOP, last=True, usage=Usage(20, 0, 19, 1900, 1),
        timings=Timings(tier_s=0.25),
    )  # fmt: skip
    assert only(stage.say("d0", end), FinishRequest).summary.tier_s == 0.75


def test_what_the_decision_took_is_told(stage: Stage) -> None:
    stage.machine.fleet.decided_s = 0.125
    stage.arrive()
    done = Delta("r", 0, (7,), finish=FinishReason.STOP, last=True, usage=Usage(20, 0, 19, 0, 1))
    stage.prefilled("p0")
    assert only(stage.say("d0", done), FinishRequest).summary.route_s == 0.125
