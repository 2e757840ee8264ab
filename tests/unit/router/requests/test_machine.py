"""The request machine, one guarantee at a time."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

import pytest

from kvasir.core.errors import CapacityError, RequestError, UpstreamError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import (
    Delta,
    EngineLoad,
    FinishReason,
    KvHandoff,
    Leg,
    Request,
    Role,
    Sampling,
    SloClass,
    StepBatch,
    Usage,
    token_ids,
)
from kvasir_router.admission import AdmissionRules
from kvasir_router.build import hash_blocks
from kvasir_router.decide import CostRates, RateBook, make_policy
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.index import FleetIndex
from kvasir_router.requests.events import (
    AbortOn,
    ClientGone,
    Effect,
    EmitDelta,
    Event,
    FailRequest,
    FinishRequest,
    ReleaseOn,
    RequestArrived,
    RequestCancelled,
    StepReceived,
    SubmitTo,
    TimerTick,
    WorkerDraining,
    WorkerInterrupted,
    WorkerLost,
    WorkerReady,
)
from kvasir_router.requests.machine import MachineLimits, RequestMachine

T = TypeVar("T")
MakeIdentity = Callable[..., WorkerIdentity]
TRACED = f"00-{'4b' * 16}-{'f0' * 8}-00 kvasir=tail"


class Stage:
    """A machine with a clock that tests set; every event is followed by a check of all invariants."""

    def __init__(
        self,
        make_identity: MakeIdentity,
        disaggregation: str = "always",
        rules: AdmissionRules | None = None,
        **limits: Any,
    ) -> None:
        self.make_identity = make_identity
        self.now = 0.0
        self.rates = RateBook(lambda _: CostRates())
        self.machine = RequestMachine(
            Fleet(
                make_policy("cost", disaggregation, Random(0)),
                FleetIndex(capacity_blocks=1000, predicted_blocks=1000, predicted_ttl_s=1000.0),
                self.rates,
                hash_blocks=hash_blocks,
                expected_output_tokens=16,
            ),
            MachineLimits(**limits),
            rules or AdmissionRules(),
        )

    def tell(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        self.machine.validate_state()
        return effects

    def ready(self, **roles: Role) -> None:
        for worker_id, role in roles.items():
            self.tell(WorkerReady(worker_id, self.make_identity(worker_id, role)))

    def arrive(self, name: str = "r", tokens: int = 20, **request: float) -> list[Effect]:
        return self.tell(RequestArrived(Request(name, "m", token_ids(range(tokens)), **request)))  # type: ignore[arg-type]  # any field, by name

    def say(self, worker_id: str, *deltas: Delta) -> list[Effect]:
        return self.tell(StepReceived(worker_id, StepBatch(deltas)))

    def offered(self, worker_id: str, name: str = "r") -> list[Effect]:
        return self.say(worker_id, Delta(name, 0, handoff=handoff_of(name)))

    def prefilled(self, worker_id: str, name: str = "r", cached: int = 0) -> list[Effect]:
        handoff = handoff_of(name)
        usage = Usage(prompt_tokens=20, cached_tokens=cached, output_tokens=1)
        delta = Delta(name, 0, (1,), finish=FinishReason.LENGTH, last=True, usage=usage, handoff=handoff)
        return self.say(worker_id, delta)


def handoff_of(name: str) -> KvHandoff:
    return KvHandoff(f"lease-{name}", 1, 20.0, 5, b"ticket")


def only(effects: list[Effect], kind: type[T]) -> T:
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


def has(effects: list[Effect], kind: type[Effect]) -> bool:
    return any(isinstance(effect, kind) for effect in effects)


def test_the_legs_follow_each_other_and_the_lease_ends_with_the_first_token(stage: Stage) -> None:
    submitted = only(stage.arrive(), SubmitTo)
    assert (submitted.worker_id, submitted.request.leg) == ("p0", Leg.PREFILL)
    decode = only(stage.prefilled("p0"), SubmitTo)
    assert (decode.worker_id, decode.request.leg) == ("d0", Leg.DECODE)
    assert decode.request.handoff is not None
    assert stage.machine.leases == 1
    effects = stage.say("d0", Delta("r", 0, (7,)))
    assert only(effects, ReleaseOn) == ReleaseOn("p0", ("lease-r",))
    assert only(effects, EmitDelta).delta.token_ids == (7,)


@pytest.mark.parametrize("traced", [True, False])
def test_workers_get_the_class_of_a_request_whose_legs_they_may_record(stage: Stage, traced: bool) -> None:
    slo = SloClass("batch", ttft_s=60.0, itl_s=1.0)
    request = Request("r", "m", token_ids(range(20)), slo=slo, trace_context=TRACED if traced else "")
    prefill = only(stage.tell(RequestArrived(request)), SubmitTo).request
    decode = only(stage.prefilled("p0"), SubmitTo).request
    assert [prefill.slo, decode.slo] == [slo if traced else None] * 2


@pytest.mark.parametrize("itl_s", [0.1, 0.2])
def test_workers_do_not_get_a_class_by_whose_promises_they_judge_anyway(
    make_identity: MakeIdentity, itl_s: float
) -> None:
    stage = Stage(make_identity, known_slo=SloClass("any", ttft_s=2.0, itl_s=0.1))
    stage.ready(p0=Role.PREFILL, d0=Role.DECODE)
    slo = SloClass("chat", ttft_s=2.0, itl_s=itl_s)
    request = Request("r", "m", token_ids(range(20)), slo=slo, trace_context=TRACED)
    prefill = only(stage.tell(RequestArrived(request)), SubmitTo).request
    decode = only(stage.prefilled("p0"), SubmitTo).request
    assert [prefill.slo, decode.slo] == [None if itl_s == 0.1 else slo] * 2


def test_the_prefill_legs_own_token_never_reaches_the_client(stage: Stage) -> None:
    stage.arrive()
    assert not has(stage.say("p0", Delta("r", 0, (1,))), EmitDelta)
    assert not has(stage.prefilled("p0"), EmitDelta)


def test_the_summary_counts_the_prefix_hit_of_the_worker_that_computed_the_prompt(stage: Stage) -> None:
    stage.arrive()
    stage.now = 1.0
    stage.prefilled("p0", cached=8)
    stage.now = 2.0
    usage = Usage(20, 0, 19, 1900, 1)
    effects = stage.say("d0", Delta("r", 0, (7,), finish=FinishReason.STOP, last=True, usage=usage))
    summary = only(effects, FinishRequest).summary
    assert summary.usage == Usage(20, 8, 19, 1900, 1)
    assert only(effects, EmitDelta).delta.usage == summary.usage
    assert (summary.routed_s, summary.prefill_done_s, summary.first_token_s) == (0.0, 1.0, 2.0)
    assert (summary.prefill_worker, summary.decode_worker) == ("p0", "d0")


def test_the_clients_first_tokens_tell_the_prefix_hit_of_the_worker_that_computed_the_prompt(
    stage: Stage,
) -> None:
    stage.arrive()
    stage.prefilled("p0", cached=8)
    first = only(stage.say("d0", Delta("r", 0, (7, 8))), EmitDelta).delta
    assert first.usage == Usage(prompt_tokens=20, cached_tokens=8, output_tokens=2)
    assert only(stage.say("d0", Delta("r", 2, (9,))), EmitDelta).delta.usage is None
    gone = only(stage.tell(RequestCancelled("r", "client_closed")), ClientGone).summary
    assert gone.usage == first.usage, "what more came is known to whoever was sent it"


def test_the_first_tokens_of_a_prompt_that_nobody_had_tell_nothing(stage: Stage) -> None:
    stage.arrive()
    stage.prefilled("p0")
    assert only(stage.say("d0", Delta("r", 0, (7,))), EmitDelta).delta.usage is None


def test_where_one_worker_does_all_its_first_tokens_tell_its_own_prefix_hit(
    make_identity: MakeIdentity,
) -> None:
    stage = Stage(make_identity, disaggregation="never")
    stage.ready(b0=Role.BOTH)
    stage.arrive()
    usage = Usage(prompt_tokens=20, cached_tokens=16, output_tokens=1)
    delta = only(stage.say("b0", Delta("r", 0, (7,), usage=usage)), EmitDelta).delta
    assert delta.usage == usage


@pytest.mark.parametrize("offset", [0, 2, 5])
def test_a_lost_or_repeated_token_is_an_error_and_is_never_passed_on(stage: Stage, offset: int) -> None:
    stage.arrive()
    stage.prefilled("p0")
    stage.say("d0", Delta("r", 0, (7,)))
    effects = stage.say("d0", Delta("r", offset, (8,)))
    assert not has(effects, EmitDelta)
    error = only(effects, FailRequest).error
    assert isinstance(error, UpstreamError)
    assert error.code == "protocol_error"
    assert only(effects, AbortOn) == AbortOn("d0", ("r",))


def test_a_failed_prefill_is_tried_again_elsewhere_under_another_name(stage: Stage) -> None:
    stage.ready(p1=Role.PREFILL)
    first = only(stage.arrive(), SubmitTo).worker_id
    failed = Delta("r", 0, finish=FinishReason.ERROR, last=True, error="worker_failed")
    again = only(stage.say(first, failed), SubmitTo)
    assert {first, again.worker_id} == {"p0", "p1"}
    assert again.request.request_id == "r~1"


def test_retries_end(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, max_retries=2)
    stage.ready(p0=Role.PREFILL, d0=Role.DECODE)
    name = only(stage.arrive(), SubmitTo).request.request_id
    for _ in range(2):
        failed = Delta(name, 0, finish=FinishReason.ERROR, last=True, error="worker_failed")
        name = only(stage.say("p0", failed), SubmitTo).request.request_id
    effects = stage.say("p0", Delta(name, 0, finish=FinishReason.ERROR, last=True, error="worker_failed"))
    assert only(effects, FailRequest).error.code == "worker_failed"
    assert only(effects, FailRequest).summary.retries == 2


def test_what_only_the_client_can_mend_is_not_tried_again(stage: Stage) -> None:
    stage.arrive()
    code = "context_length_exceeded"
    effects = stage.say("p0", Delta("r", 0, finish=FinishReason.ERROR, last=True, error=code))
    error = only(effects, FailRequest).error
    assert isinstance(error, RequestError)
    assert (error.status, error.code) == (400, code)


def test_a_decode_worker_lost_before_a_token_costs_a_new_start(stage: Stage) -> None:
    stage.ready(d1=Role.DECODE)
    stage.arrive()
    decode = only(stage.prefilled("p0"), SubmitTo).worker_id
    effects = stage.tell(WorkerLost(decode, "gone"))
    assert only(effects, ReleaseOn) == ReleaseOn("p0", ("lease-r",))
    assert only(effects, SubmitTo).request.leg is Leg.PREFILL
    other = only(stage.prefilled("p0", "r~1"), SubmitTo)
    assert other.worker_id != decode
    emitted = only(stage.say(other.worker_id, Delta("r~1", 0, (7,))), EmitDelta)
    assert emitted.delta.request_id == "r"


@pytest.mark.parametrize("event", [WorkerDraining("d0", "upgrade"), WorkerInterrupted("d0")])
def test_kv_whose_decode_worker_takes_nothing_more_goes_to_another_one(stage: Stage, event: Event) -> None:
    stage.arrive()
    stage.ready(d1=Role.DECODE)
    stage.tell(event)
    decode = only(stage.prefilled("p0"), SubmitTo)
    assert (decode.worker_id, decode.request.leg) == ("d1", Leg.DECODE)


def test_kv_that_nobody_can_take_is_released_and_the_request_waits(stage: Stage) -> None:
    stage.arrive()
    stage.tell(WorkerLost("d0", "gone"))
    effects = stage.prefilled("p0")
    assert only(effects, ReleaseOn) == ReleaseOn("p0", ("lease-r",))
    assert stage.machine.queued == 1
    stage.ready(d1=Role.DECODE)
    assert stage.machine.queued == 0


def test_kv_offered_after_the_abort_is_released_at_once(stage: Stage) -> None:
    stage.arrive()
    assert only(stage.tell(RequestCancelled("r")), AbortOn) == AbortOn("p0", ("r",))
    assert only(stage.prefilled("p0"), ReleaseOn) == ReleaseOn("p0", ("lease-r",))


def test_a_name_is_not_used_again_while_its_aborted_leg_lives(stage: Stage) -> None:
    stage.arrive()
    stage.tell(RequestCancelled("r"))
    assert only(stage.arrive(), SubmitTo).request.request_id != "r"


def test_an_aborted_leg_that_never_ends_is_forgotten(stage: Stage) -> None:
    stage.arrive()
    stage.tell(RequestCancelled("r"))
    stage.now = 61.0
    stage.tell(TimerTick())
    assert not stage.machine.fleet.workers["p0"].ghosts


def test_a_resumed_session_keeps_its_requests_and_a_new_life_of_the_worker_does_not(stage: Stage) -> None:
    stage.arrive()
    stage.tell(WorkerInterrupted("p0"))
    assert stage.tell(WorkerReady("p0", stage.make_identity("p0", Role.PREFILL))) == []
    again = stage.tell(WorkerReady("p0", stage.make_identity("p0", Role.PREFILL, epoch=2)))
    assert only(again, SubmitTo).request.request_id == "r~1"


def test_the_queue_is_served_in_order_of_arrival(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, disaggregation="never", rules=AdmissionRules(max_queue=3))
    for name in "abc":
        assert stage.arrive(name) == []
    with pytest.raises(CapacityError) as caught:
        stage.arrive("d")
    assert caught.value.code == "queue_full"
    effects = stage.tell(WorkerReady("w", make_identity("w")))
    assert [e.request.request_id for e in effects if isinstance(e, SubmitTo)] == ["a", "b", "c"]


def test_a_deadline_and_a_wait_end_a_request_when_they_are_due(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity)
    stage.arrive("patient")
    stage.arrive("hasty", deadline_s=10.0)
    assert stage.machine.next_wakeup() == 10.0
    stage.now = 10.0
    assert only(stage.tell(TimerTick()), FailRequest).error.code == "request_timeout"
    stage.now = 60.0
    assert only(stage.tell(TimerTick()), FailRequest).error.code == "no_workers"
    assert stage.machine.next_wakeup() is None


def test_work_is_accounted_from_the_decision_on_though_reports_lag(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, disaggregation="never")
    stage.ready(b0=Role.BOTH, b1=Role.BOTH)
    idle = StepBatch(load=EngineLoad())
    counts = {"b0": 0, "b1": 0}
    for number in range(10):
        request = Request(f"r{number}", "m", token_ids([number] * 20), Sampling(max_tokens=16))
        counts[only(stage.tell(RequestArrived(request)), SubmitTo).worker_id] += 1
        for worker_id in counts:
            stage.tell(StepReceived(worker_id, idle))
    assert counts == {"b0": 5, "b1": 5}


def test_what_other_routers_put_on_a_worker_counts(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, disaggregation="never")
    stage.ready(b0=Role.BOTH, b1=Role.BOTH)
    stage.tell(StepReceived("b0", StepBatch(load=EngineLoad(running=30, waiting=5))))
    for number in range(4):
        assert only(stage.arrive(f"r{number}"), SubmitTo).worker_id == "b1"


def test_an_adapter_is_served_only_where_it_is_loaded(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, disaggregation="never")
    stage.tell(WorkerReady("plain", make_identity("plain")))
    stage.tell(WorkerReady("tuned", make_identity("tuned", adapters=("law",))))
    request = Request("r", "m", token_ids(range(9)), adapter="law")
    assert only(stage.tell(RequestArrived(request)), SubmitTo).worker_id == "tuned"


def test_a_request_goes_to_the_data_parallel_rank_that_holds_its_prefix(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, disaggregation="never")
    stage.tell(WorkerReady("w", make_identity("w", ranks=2)))
    ranks = set()
    for name in "abcd":
        ranks.add(only(stage.arrive(name, tokens=100), SubmitTo).request.data_parallel_rank)
        stage.say("w", Delta(name, 0, (7,), finish=FinishReason.STOP, last=True))
    assert len(ranks) == 1
    assert ranks < {0, 1}
