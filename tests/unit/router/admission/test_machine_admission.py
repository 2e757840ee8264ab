"""Requests that the machine starts, queues and refuses. Workers have 400 KV tokens, in blocks of 4."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvasir.core.errors import CapacityError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import (
    Delta,
    EngineLoad,
    FinishReason,
    Request,
    Role,
    Sampling,
    SloClass,
    StepBatch,
    Usage,
    token_ids,
)
from kvasir.telemetry.reasons import http_status
from kvasir_router.admission import AdmissionRules, BrownoutRules, BrownoutStep
from kvasir_router.build import hash_blocks
from kvasir_router.decide import CostRates, RateBook, make_policy
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.index import FleetIndex
from kvasir_router.requests.events import (
    Effect,
    EmitDelta,
    Event,
    FailRequest,
    FinishRequest,
    RequestArrived,
    RequestCancelled,
    StepReceived,
    SubmitTo,
    TimerTick,
    WorkerLost,
    WorkerReady,
)
from kvasir_router.requests.machine import MachineLimits, RequestMachine

MakeIdentity = Callable[..., WorkerIdentity]
SLO = SloClass("default", ttft_s=1.0, itl_s=0.1)
OUTPUT = 10
TOKEN_S = 1e-3


class Stage:
    """A machine whose workers compute a thousand prompt tokens a second, with a clock that tests set."""

    def __init__(self, make_identity: MakeIdentity, *, disaggregation: str = "never", **rules: Any) -> None:
        self.make_identity = make_identity
        self.now = 0.0
        self.count = 0
        rates = CostRates(prefill_fixed_s=0.0, prefill_token_s=TOKEN_S, step_fixed_s=0.01, step_stream_s=0.01)
        self.fleet = Fleet(
            make_policy("cost", disaggregation, Random(0)),
            FleetIndex(capacity_blocks=10_000, predicted_blocks=10_000, predicted_ttl_s=1000.0),
            RateBook(lambda _: rates),
            hash_blocks=hash_blocks,
            expected_output_tokens=OUTPUT,
        )
        self.machine = RequestMachine(
            self.fleet,
            MachineLimits(hedge_after=0.0),
            AdmissionRules(**{"disaggregation": disaggregation, **rules}),
        )
        self.begun: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def tell(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        self.machine.validate_state()
        for effect in effects:
            if isinstance(effect, SubmitTo):
                self.begun[effect.request.request_id] = effect.worker_id
            elif isinstance(effect, FailRequest):
                self.failed[effect.request_id] = effect.error.code
        return effects

    def ready(self, *names: str, role: Role = Role.BOTH) -> None:
        for name in names:
            self.tell(WorkerReady(name, self.make_identity(name, role)))

    def arrive(self, name: str, prompt: int = 20, n: int = 1, **more: Any) -> bool:
        """A request with a prompt of its own; whether it begins at once."""
        self.count += 1
        tokens = token_ids([self.count] * prompt)
        fields: dict[str, Any] = {"slo": SLO, "arrival_s": self.now} | more
        self.tell(RequestArrived(Request(name, "m", tokens, Sampling(n=n, max_tokens=OUTPUT), **fields)))
        return name in self.begun

    def refused(self, name: str, **fields: Any) -> CapacityError:
        with pytest.raises(CapacityError) as caught:
            self.arrive(name, **fields)
        return caught.value

    def say(self, name: str, *, last: bool = False) -> list[Effect]:
        """The first token of a request that runs, or the only one."""
        finish = FinishReason.STOP if last else None
        usage = Usage(20, output_tokens=1) if last else None
        delta = Delta(name, 0, (7,), finish=finish, last=last, usage=usage)
        return self.tell(StepReceived(self.begun[name], StepBatch((delta,))))

    def wait(self, seconds: float) -> None:
        """Time passes, with a tick whenever one is due."""
        until = self.now + seconds
        while (due := self.machine.next_wakeup()) is not None and due <= until:
            self.now = max(self.now, due)
            self.tell(TimerTick())
        self.now = until
        self.tell(TimerTick())


def test_what_pools_hold_is_reserved_for_prompt_and_output_and_the_rest_waits(
    make_identity: MakeIdentity,
) -> None:
    stage = Stage(make_identity, headroom=0.1)
    stage.ready("w")
    assert [stage.arrive(name, prompt=110) for name in "abc"] == [True, True, True]
    assert not stage.arrive("d", prompt=110)
    assert stage.machine.queued == 1
    stage.say("a", last=True)
    assert "d" in stage.begun


def test_a_cached_prefix_is_not_charged_again(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity)
    stage.ready("w")
    tokens = token_ids(range(300))
    for name in "abc":
        stage.tell(RequestArrived(Request(name, "m", tokens, Sampling(max_tokens=OUTPUT), slo=SLO)))
        assert name in stage.begun
        stage.say(name)


def test_a_place_where_nothing_runs_takes_what_is_larger_than_it(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, headroom=0.5)
    stage.ready("w")
    assert stage.arrive("large", prompt=390)
    assert not stage.arrive("next", prompt=390)


def test_a_request_goes_where_there_is_room_whatever_the_policy_prefers(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 2})
    stage.ready("w0", "w1")
    assert all(stage.arrive(name) for name in "abcd")
    assert sorted(stage.begun.values()) == ["w0", "w0", "w1", "w1"]
    assert not stage.arrive("e")


def test_choices_take_a_seat_each(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 4})
    stage.ready("w")
    assert stage.arrive("a", n=3)
    assert not stage.arrive("b", n=2)


def test_streams_are_added_until_the_promised_time_between_tokens_is_used_up(
    make_identity: MakeIdentity,
) -> None:
    stage = Stage(make_identity, itl_slack=0.5)
    stage.ready("w")
    assert [stage.arrive(name) for name in "abcde"] == [True, True, True, True, False]


def test_a_promise_that_cannot_be_kept_at_all_limits_nothing(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, itl_slack=0.1)
    stage.ready("w")
    assert all(stage.arrive(name) for name in "abcde")


def test_a_worker_is_sent_the_next_prompt_when_it_has_little_left_to_compute(
    make_identity: MakeIdentity,
) -> None:
    stage = Stage(make_identity, ahead_s=0.05)
    stage.ready("w")
    assert stage.arrive("a", prompt=100)
    assert not stage.arrive("b", prompt=100)
    stage.wait(0.04)
    assert "b" not in stage.begun
    stage.wait(0.02)
    assert "b" in stage.begun


def test_a_prompt_that_is_done_sooner_than_foreseen_makes_room_at_once(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, ahead_s=0.05)
    stage.ready("w")
    stage.arrive("a", prompt=200)
    stage.arrive("b", prompt=100)
    stage.say("a")
    assert "b" in stage.begun


def test_tenants_take_turns_and_classes_do_not(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 1})
    stage.ready("w")
    stage.arrive("running", tenant="greedy")
    for name in ("g1", "g2", "g3"):
        stage.arrive(name, tenant="greedy")
    stage.arrive("o1", tenant="other")
    stage.arrive("late", tenant="batch", priority=1000)
    for number in range(5):
        stage.say(list(stage.begun)[number], last=True)
    assert list(stage.begun) == ["running", "o1", "g1", "g2", "g3", "late"]


def test_age_brings_a_less_urgent_class_forward(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 1}, ageing_s=5.0)
    stage.ready("w")
    stage.arrive("running")
    stage.arrive("old", priority=1000)
    stage.now = 6.0
    stage.arrive("young")
    stage.say("running", last=True)
    assert "old" in stage.begun
    assert "young" not in stage.begun


def test_one_above_its_share_leaves_room_for_others(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 10}, spare=0.2)
    stage.ready("w")
    stage.arrive("first", tenant="other")
    stage.say("first", last=True)
    begun = [stage.arrive(f"g{number}", tenant="greedy") for number in range(10)]
    assert begun == [True] * 8 + [False] * 2
    assert stage.arrive("o1", tenant="other")
    assert stage.arrive("o2", tenant="other")


@pytest.mark.parametrize("served", [True, False])
def test_a_tenant_whose_only_request_waits_for_long_is_still_reckoned_with(
    make_identity: MakeIdentity, served: bool
) -> None:
    stage = Stage(make_identity, seats={"both": 1})
    if served:
        stage.ready("w")
    stage.arrive("a", tenant="a")
    stage.arrive("b", tenant="b")
    for number in range(14):
        stage.wait(1.0)
        stage.arrive(f"c{number}", tenant="c")
    if not served:
        stage.ready("w")
    stage.say("a", last=True)
    assert "b" in stage.begun


def test_alone_a_tenant_may_take_everything(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 10}, spare=0.2)
    stage.ready("w")
    assert all(stage.arrive(f"g{number}", tenant="greedy") for number in range(10))


def drained(stage: Stage, requests: int, every_s: float) -> None:
    """Some requests wait, and one begins every so often: their pace is known."""
    for number in range(requests):
        stage.arrive(f"r{number}")
    for number in range(requests):
        stage.wait(every_s)
        if f"r{number}" in stage.begun:
            stage.say(f"r{number}", last=True)


def test_a_wait_that_would_be_too_long_is_refused_at_once_and_told(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 1}, patience=1.0)
    stage.ready("w")
    drained(stage, 9, 0.25)
    stage.arrive("running")
    accepted = [stage.arrive(f"w{number}") for number in range(3)]
    assert not any(accepted)
    error = None
    for number in range(20):
        try:
            stage.arrive(f"more{number}")
        except CapacityError as caught:
            error = caught
            break
    assert error is not None
    assert (error.code, http_status(error)) == ("wait_too_long", 503)
    assert number <= 4
    assert error.retry_after_s >= 1.0
    patient = SloClass("batch", ttft_s=100.0, itl_s=0.1)
    assert not stage.arrive("patient", slo=patient)


def queue_up(stage: Stage) -> int:
    """How many begin or wait before one is refused."""
    for number in range(20):
        try:
            stage.arrive(f"queued{number}")
        except CapacityError:
            return number
    raise AssertionError("nobody was refused")


def test_a_worker_that_comes_ends_refusals_before_its_pace_is_measured(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 1}, patience=1.0)
    stage.ready("w")
    drained(stage, 9, 0.25)
    alone = queue_up(stage)
    stage.ready("x", "y")
    assert [stage.arrive(f"later{number}") for number in range(alone)] == [False] * alone


def test_how_long_a_request_took_that_was_moved_is_not_what_others_take(make_identity: MakeIdentity) -> None:
    def accepted(*, moved: bool) -> int:
        stage = Stage(make_identity, seats={"both": 1}, patience=1.0)
        stage.ready("w")
        stage.arrive("first")
        if moved:
            stage.ready("x")
            stage.tell(WorkerLost("w", "gone"))
            stage.wait(3.0)
        stage.say("first~1" if moved else "first", last=True)
        drained(stage, 9, 0.25)
        return queue_up(stage)

    assert accepted(moved=True) == accepted(moved=False) > 2


def test_a_wait_behind_ones_own_requests_is_ones_own_to_mend(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 1}, patience=1.0)
    stage.ready("w")
    drained(stage, 9, 0.25)
    stage.arrive("running", tenant="greedy")
    stage.arrive("theirs", tenant="other")
    codes = set()
    for number in range(20):
        try:
            stage.arrive(f"more{number}", tenant="greedy")
        except CapacityError as error:
            codes.add((error.code, http_status(error)))
    assert codes == {("tenant_over_share", 429)}
    assert not stage.arrive("mine", tenant="other")


def test_a_deadline_that_cannot_be_met_is_refused_at_once(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 1})
    stage.ready("w")
    drained(stage, 9, 1.0)
    stage.arrive("running")
    for number in range(3):
        stage.arrive(f"w{number}")
    error = stage.refused("hasty", deadline_s=stage.now + 1.5)
    assert (error.code, http_status(error)) == ("deadline_unreachable", 503)
    assert 1.0 <= error.retry_after_s <= 5.0
    assert not stage.arrive("patient", deadline_s=stage.now + 60.0)


def test_queues_are_bounded_for_all_and_for_each(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 1}, max_queue=4, max_tenant_queue=2)
    stage.ready("w")
    stage.arrive("running")
    for name in ("g1", "g2"):
        stage.arrive(name, tenant="greedy")
    mine = stage.refused("g3", tenant="greedy")
    assert (mine.code, http_status(mine)) == ("tenant_queue_full", 429)
    for name in ("o1", "o2"):
        stage.arrive(name, tenant="other")
    ours = stage.refused("third", tenant="third")
    assert (ours.code, http_status(ours)) == ("queue_full", 503)
    assert stage.machine.in_flight == 5
    stage.tell(RequestCancelled("o1"))
    assert not stage.arrive("third", tenant="third")


def test_waiting_prompts_are_bounded_in_tokens(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 1}, max_queue_tokens=100)
    stage.ready("w")
    stage.arrive("running")
    stage.arrive("a", prompt=60)
    assert stage.refused("b", prompt=60).code == "queue_full"
    assert not stage.arrive("c", prompt=40)


def test_who_waited_too_long_for_room_is_told_so(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 1})
    stage.ready("w")
    stage.arrive("running")
    stage.arrive("waiting")
    stage.wait(61.0)
    assert stage.failed == {"waiting": "queue_timeout"}


def test_what_nobody_serves_waits_aside_and_holds_nobody_up(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 1})
    stage.ready("w")
    assert not stage.arrive("law", adapter="law")
    assert stage.arrive("plain")
    stage.tell(WorkerReady("tuned", make_identity("tuned", adapters=("law",))))
    assert stage.begun["law"] == "tuned"


def test_a_request_that_lost_its_worker_is_not_judged_again(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 1})
    stage.ready("w0", "w1")
    assert stage.arrive("a")
    assert stage.arrive("b")
    assert not stage.arrive("waiting")
    stage.tell(WorkerLost("w0", "gone"))
    moved = [name for name in stage.begun if name.endswith("~1")]
    assert len(moved) == 1
    assert "waiting" not in stage.begun
    assert stage.machine.accounting().running == 2


def test_a_request_whose_worker_was_the_last_begins_before_all_others_when_one_is_back(
    make_identity: MakeIdentity,
) -> None:
    stage = Stage(make_identity, seats={"both": 1})
    stage.ready("w")
    stage.arrive("running")
    stage.arrive("waiting", priority=0)
    stage.tell(WorkerLost("w", "gone"))
    assert stage.machine.queued == 2
    stage.ready("w2")
    assert list(stage.begun) == ["running", "running~1"]


def test_long_prompts_take_their_share_and_the_others_pass_them(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, long_tokens=100, long_share=0.5)
    stage.ready("w0", "w1", "w2", "w3")
    assert [stage.arrive(f"l{number}", prompt=150) for number in range(4)] == [True, True, False, False]
    assert stage.arrive("short", prompt=50)
    assert not stage.arrive("l4", prompt=150)
    stage.say("l0")
    assert "l2" in stage.begun
    assert "l3" not in stage.begun


def test_long_prompts_hold_their_share_of_the_kv_at_most_but_one_always_may(
    make_identity: MakeIdentity,
) -> None:
    stage = Stage(make_identity, long_tokens=100, long_share=0.25)
    stage.ready("w0", "w1")
    assert stage.arrive("l0", prompt=250)
    stage.say("l0")
    assert not stage.arrive("l1", prompt=150)
    assert stage.arrive("short", prompt=50)
    stage.tell(StepReceived("w0", StepBatch(load=EngineLoad())))
    delta = Delta("l0", 1, (), finish=FinishReason.STOP, last=True, usage=Usage(250, output_tokens=1))
    stage.tell(StepReceived(stage.begun["l0"], StepBatch((delta,))))
    assert "l1" in stage.begun


def test_a_long_prompt_that_waits_for_kv_has_it_kept(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, long_tokens=200)
    stage.ready("w")
    for number in range(10):
        assert stage.arrive(f"s{number}", prompt=20)
    assert not stage.arrive("long", prompt=250)
    # There would be room for it beside those that run, and not for the long one after that.
    assert not stage.arrive("late", prompt=20)
    for number in range(6):
        stage.say(f"s{number}", last=True)
    assert "long" in stage.begun


def brownout(stage_of: MakeIdentity, *steps: BrownoutStep) -> Stage:
    rules = BrownoutRules(steps, enter=0.5, leave=0.1, enter_s=1.0, leave_s=5.0)
    stage = Stage(stage_of, seats={"both": 1}, brownout=rules)
    stage.ready("w")
    drained(stage, 9, 0.25)
    stage.arrive("running")
    for number in range(20):
        stage.arrive(f"w{number}")
    stage.wait(3.0)
    return stage


def test_under_pressure_outputs_are_cut_and_summaries_say_so(make_identity: MakeIdentity) -> None:
    stage = brownout(make_identity, BrownoutStep(cap_max_tokens=5), BrownoutStep(shed=2))
    view = stage.machine.admission(stage.now)
    assert (view.brownout.level, view.brownout.text) == (2, "2; cap_max_tokens=5; shed=2")
    assert view.pressure > 0.5
    for number in range(20):
        stage.tell(RequestCancelled(f"w{number}"))
    stage.say("running", last=True)
    effects = stage.tell(RequestArrived(Request("r", "m", token_ids([9]), Sampling(max_tokens=50), slo=SLO)))
    (submitted,) = [effect for effect in effects if isinstance(effect, SubmitTo)]
    assert submitted.request.sampling.max_tokens == 5
    stage.begun["r"] = submitted.worker_id
    (finish,) = [effect for effect in stage.say("r", last=True) if isinstance(effect, FinishRequest)]
    assert finish.summary.brownout == "2; cap_max_tokens=5; shed=2"


def test_under_pressure_less_urgent_classes_are_refused(make_identity: MakeIdentity) -> None:
    stage = brownout(make_identity, BrownoutStep(shed=1))
    error = stage.refused("batch", priority=1500)
    assert (error.code, http_status(error)) == ("shed", 503)
    assert not stage.arrive("interactive", priority=900)


def test_a_brownout_ends_by_itself_when_nothing_happens_any_more(make_identity: MakeIdentity) -> None:
    stage = brownout(make_identity, BrownoutStep(fallback_model="small"))
    assert stage.machine.brownout.fallback_model == "small"
    for number in range(20):
        stage.tell(RequestCancelled(f"w{number}"))
    stage.say("running", last=True)
    stage.wait(20.0)
    assert stage.machine.brownout.level == 0
    assert stage.machine._admission.next_due() is None


def test_what_the_engine_takes_apart_reaches_the_client(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity)
    stage.ready("w")
    stage.arrive("r")
    effects = stage.tell(StepReceived("w", StepBatch((Delta("r", 0, reasoning="hm", raw_length=2),))))
    (emitted,) = [effect for effect in effects if isinstance(effect, EmitDelta)]
    assert emitted.delta.reasoning == "hm"


def test_every_wakeup_is_followed_by_a_later_one(make_identity: MakeIdentity) -> None:
    stage = brownout(make_identity, *(BrownoutStep(cap_max_tokens=number) for number in range(1, 9)))
    for _ in range(300):
        due = stage.machine.next_wakeup()
        assert due is not None
        assert due > stage.now
        stage.now = due
        stage.tell(TimerTick())


LINE = {"priority": 3000}
"""A line of a batch."""


def test_a_line_of_a_batch_starts_only_up_to_its_part_of_a_place(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 8}, spare_level=3, spare_share=0.5)
    stage.ready("w")
    assert [stage.arrive(name) for name in "ab"] == [True, True]
    assert [stage.arrive(name, **LINE) for name in "cd"] == [True, True]
    assert stage.refused("e", **LINE).code == "no_spare_capacity"
    assert [stage.arrive(name) for name in "fghi"] == [True, True, True, True]
    stage.say("c", last=True)
    assert stage.refused("j", **LINE).code == "no_spare_capacity"


def test_a_line_of_a_batch_never_waits_and_never_passes_what_waits(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 2}, spare_level=3, spare_share=1.0)
    stage.ready("w")
    assert [stage.arrive(name) for name in "abc"] == [True, True, False]
    assert stage.refused("line", **LINE).code == "no_spare_capacity"
    assert stage.machine.queued == 1
    stage.say("a", last=True)
    assert "c" in stage.begun


def test_a_line_of_a_batch_makes_no_tenant_one_of_several(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, seats={"both": 8}, spare=0.5, spare_level=3)
    stage.ready("w")
    assert stage.arrive("line", tenant="other", **LINE)
    assert all(stage.arrive(name, tenant="one") for name in "abcdefg")


def test_no_line_of_a_batch_starts_under_a_brown_out(make_identity: MakeIdentity) -> None:
    brownout = BrownoutRules(
        (BrownoutStep(cap_max_tokens=5),), enter=0.1, leave=0.05, enter_s=0.1, leave_s=9.0
    )
    stage = Stage(make_identity, seats={"both": 1}, brownout=brownout, spare_level=3, spare_share=1.0)
    stage.ready("w0", "w1")
    for number in range(60):
        stage.arrive(f"r{number}")
    for number in range(40):
        stage.wait(0.1)
        stage.say(f"r{number}", last=True)
    assert stage.machine.brownout.level == 1
    assert stage.refused("line", **LINE).code == "no_spare_capacity"
