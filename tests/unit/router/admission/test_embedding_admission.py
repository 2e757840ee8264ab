"""Queued embedding inputs: order, refusals, and shedding under pressure."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from typing import Any

import pytest
from tests.kit.gateway.embedding_worker import embedding_worker

from kvasir.core.errors import CapacityError
from kvasir.core.requests import Delta, EngineLoad, FinishReason, Request, StepBatch, Task, token_ids
from kvasir_router.admission import AdmissionRules, BrownoutRules, BrownoutStep
from kvasir_router.embeddings.fleet import BatchLimits, EmbeddingFleet
from kvasir_router.embeddings.machine import EmbeddingMachine
from kvasir_router.requests.events import (
    ClientGone,
    Effect,
    FailRequest,
    RequestArrived,
    RequestCancelled,
    StepReceived,
    SubmitTo,
    TimerTick,
    WorkerReady,
)
from kvasir_router.requests.state import MachineLimits

BATCH = BatchLimits(requests=1, tokens=1000)


class Stage:
    """One worker that takes two inputs at a time, and a clock that tests set. Every event is followed by a
    check of all invariants."""

    def __init__(self, **rules: Any) -> None:
        fleet = EmbeddingFleet({"vectors": BATCH}, random.Random(7))
        limits = MachineLimits(max_in_flight=200, queue_timeout_s=60.0)
        self.machine = EmbeddingMachine(fleet, limits, AdmissionRules(**rules))
        self.now = 0.0
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.failed: dict[str, str] = {}

    def tell(self, event: Any) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        self.machine.validate_state()
        for effect in effects:
            if isinstance(effect, SubmitTo):
                self.running.append(self.requests[effect.request.request_id])
            elif isinstance(effect, FailRequest):
                self.failed[effect.request_id] = effect.error.code
        return effects

    def ready(self) -> None:
        self.tell(WorkerReady("e0", embedding_worker("e0")))

    def arrive(self, tenant: str = "t", *, tokens: int = 10, **fields: Any) -> None:
        name = f"r{len(self.requests)}"
        request = Request(
            name, "m", token_ids(range(tokens)), tenant=tenant, arrival_s=self.now, task=Task.EMBED, **fields
        )
        self.requests[name] = request
        self.tell(RequestArrived(request))

    def refusal(self, tenant: str = "t", **fields: Any) -> CapacityError:
        with pytest.raises(CapacityError) as caught:
            self.arrive(tenant, **fields)
        return caught.value

    def embed(self, seconds: float = 0.1) -> Request:
        """The worker is done with what it was given first."""
        self.now += seconds
        request = self.running.pop(0)
        worker = self.machine.fleet.workers["e0"]
        (leg_id,) = [leg for leg, name in worker.legs.items() if name == request.request_id]
        delta = Delta(leg_id, 0, finish=FinishReason.STOP, last=True, embedding=array("f", (1.0,)))
        self.tell(StepReceived("e0", StepBatch((delta,), EngineLoad())))
        return request

    def press(self, inputs: int, done: int, seconds: float = 0.1) -> None:
        """A worker joins, so many inputs come at once, and of these so many are embedded."""
        self.ready()
        for _ in range(inputs):
            self.arrive()
        for _ in range(done):
            self.embed(seconds)

    def served(self, inputs: int) -> Counter[str]:
        """How many of each tenant's, of the next so many."""
        return Counter(self.embed().tenant for _ in range(inputs))


def test_tenants_that_both_wait_get_what_their_weights_say() -> None:
    stage = Stage(weights={"big": 3.0})
    stage.ready()
    for _ in range(80):
        stage.arrive("small")
    for _ in range(80):
        stage.arrive("big")
    served = stage.served(60)
    assert served["big"] == pytest.approx(45, abs=3)


def test_a_tenant_that_comes_late_does_not_wait_behind_a_large_call_of_another() -> None:
    stage = Stage()
    stage.ready()
    for _ in range(100):
        stage.arrive("greedy")
    stage.arrive("other")
    served = [stage.embed().tenant for _ in range(5)]
    assert "other" in served


def test_long_inputs_count_for_what_they_take() -> None:
    stage = Stage()
    stage.ready()
    for _ in range(60):
        stage.arrive("long", tokens=90)
        stage.arrive("short", tokens=10)
    served = stage.served(50)
    assert served["short"] == pytest.approx(45, abs=3)


def test_a_more_urgent_class_goes_first_until_the_other_has_waited_long() -> None:
    stage = Stage(ageing_s=10.0, class_span=1000)
    stage.ready()
    for _ in range(6):
        stage.arrive("batch", priority=1000)
    for _ in range(6):
        stage.arrive("online")
    assert stage.served(2) == {"batch": 2}, "they ran already"
    assert stage.served(4) == {"online": 4}
    stage.now += 11.0
    stage.arrive("online")
    stage.served(2)
    assert stage.embed().tenant == "batch"


def test_a_tenant_whose_only_input_waits_for_long_is_still_reckoned_with() -> None:
    stage = Stage()
    stage.ready()
    for tenant in ("first", "first", "patient"):
        stage.arrive(tenant)
    for _ in range(14):
        stage.now += 1.0
        stage.arrive("other")
    assert stage.served(4)["patient"] == 1


def test_a_tenant_takes_its_part_of_the_queue_and_no_more() -> None:
    stage = Stage(max_tenant_queue=3, max_queue=100)
    stage.ready()
    for _ in range(5):
        stage.arrive("greedy")
    assert stage.refusal("greedy").code == "tenant_queue_full"
    stage.arrive("other")


def test_what_would_come_too_late_is_refused_and_told_when_to_come_again() -> None:
    stage = Stage(patience=0.5)
    stage.press(20, 8, 0.25)
    refusal = stage.refusal()
    assert refusal.code == "wait_too_long"
    assert refusal.retry_after_s >= 1.0
    assert stage.refusal(deadline_s=stage.now + 0.3).code == "deadline_unreachable"


def test_while_no_worker_serves_nobody_is_refused_for_how_long_others_waited() -> None:
    stage = Stage(patience=0.5)
    stage.arrive()
    stage.arrive()
    assert stage.machine.queued == 2
    stage.now = 60.0
    stage.tell(TimerTick())
    assert set(stage.failed.values()) == {"no_workers"}


def test_who_waits_for_a_busy_worker_in_vain_is_told_so() -> None:
    stage = Stage()
    stage.ready()
    for _ in range(3):
        stage.arrive()
    stage.now = 60.0
    stage.tell(TimerTick())
    assert stage.failed == {"r2": "queue_timeout"}


def test_under_pressure_a_class_is_shed_and_comes_back() -> None:
    steps = (
        BrownoutStep(cap_max_tokens=5),
        BrownoutStep(fallback_model="small"),
        BrownoutStep(shed=1, shed_name="batch"),
    )
    stage = Stage(brownout=BrownoutRules(steps, enter=0.25, leave=0.05, enter_s=1.0, leave_s=2.0))
    stage.press(60, 20)
    view = stage.machine.admission(stage.now)
    assert view.pressure > 0.25
    assert view.brownout.text == "1; shed=batch", "what is of no use for vectors is not among the steps"
    assert view.brownout.fallback_model is None
    assert stage.refusal(priority=1000).code == "shed"
    stage.arrive()
    while stage.running:
        stage.embed()
    while (due := stage.machine.next_wakeup()) is not None and stage.machine.brownout.level:
        stage.now = max(stage.now, due)
        stage.tell(TimerTick())
    assert stage.machine.brownout.level == 0
    stage.arrive(priority=1000)


def test_an_input_says_in_its_summary_what_was_done_when_it_came() -> None:
    steps = (BrownoutStep(shed=1, shed_name="batch"),)
    stage = Stage(brownout=BrownoutRules(steps, enter=0.1, leave=0.05, enter_s=0.1, leave_s=50.0))
    stage.press(60, 20)
    assert stage.machine.brownout.level == 1
    stage.arrive()
    name = f"r{len(stage.requests) - 1}"
    (gone,) = stage.tell(RequestCancelled(name))
    assert isinstance(gone, ClientGone)
    assert gone.summary.brownout == "1; shed=batch"


def test_workers_that_come_are_reckoned_with_before_they_are_measured() -> None:
    stage = Stage(patience=0.5)
    stage.press(20, 8, 0.25)
    before = stage.machine.admission(stage.now).wait_s
    for name in ("e1", "e2"):
        stage.tell(WorkerReady(name, embedding_worker(name)))
    assert stage.machine.admission(stage.now).wait_s < before / 2


def test_an_input_of_a_batch_starts_at_once_or_is_refused() -> None:
    stage = Stage(spare_level=3)
    stage.ready()
    stage.arrive(priority=3000)
    stage.arrive(priority=3000)
    assert len(stage.running) == 2
    assert stage.refusal(priority=3000).code == "no_spare_capacity"
    assert stage.machine.queued == 0
