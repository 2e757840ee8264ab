"""For any order of events, every input is embedded once or fails once, and nothing leaks.

Workers here are dictionaries that obey the engine's contract. Alphabets are tiny: three workers.
"""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.kit.gateway.embedding_worker import embedding_worker

from kvasir.core.errors import CapacityError, RequestError
from kvasir.core.requests import (
    Delta,
    EngineLoad,
    EngineRequest,
    FinishReason,
    Leg,
    Request,
    StepBatch,
    Task,
    Usage,
    token_ids,
)
from kvasir_router.admission import AdmissionRules, BrownoutRules, BrownoutStep
from kvasir_router.embeddings.fleet import BatchLimits, EmbeddingFleet
from kvasir_router.embeddings.machine import EmbeddingMachine
from kvasir_router.requests.events import (
    AbortOn,
    ClientGone,
    Effect,
    EmitDelta,
    Event,
    FailRequest,
    FinishRequest,
    RequestArrived,
    RequestCancelled,
    ShuttingDown,
    StepReceived,
    SubmitTo,
    TimerTick,
    WorkerDraining,
    WorkerInterrupted,
    WorkerLost,
    WorkerReady,
    WorkerRestored,
)
from kvasir_router.requests.state import MachineLimits

WORKERS = ("e0", "e1", "e2")
# Longer than a tenant is remembered that wants nothing.
LIMITS = MachineLimits(max_in_flight=10, queue_timeout_s=25.0)
RULES = AdmissionRules(
    max_tenant_queue=5,
    class_span=1,
    patience=0.5,
    brownout=BrownoutRules((BrownoutStep(shed=1),), enter=0.2, leave=0.05, enter_s=0.5, leave_s=1.0),
)
BATCH = BatchLimits(requests=1, tokens=40)
REFUSALS = {"tenant_queue_full", "tenant_over_share", "wait_too_long", "deadline_unreachable", "shed"}
CODES = st.sampled_from(
    ("worker_failed", "worker_overloaded", "worker_draining", "invalid_request", "engine_dead")
)
workers = st.sampled_from(WORKERS)


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        fleet = EmbeddingFleet({"vectors": BATCH}, random.Random(7))
        self.machine = EmbeddingMachine(fleet, LIMITS, RULES)
        self.now = 0.0
        self.count = self.epochs = 0
        self.up: dict[str, dict[str, EngineRequest]] = {}
        self.open: set[str] = set()
        self.embedded: set[str] = set()
        self.ended: set[str] = set()
        self.closed = False

    def feed(self, event: Event) -> None:
        for effect in self.machine.handle(event, self.now):
            self.perform(effect)

    def perform(self, effect: Effect) -> None:
        match effect:
            case SubmitTo(worker_id, request):
                assert request.leg is Leg.EMBED
                assert request.request_id not in self.up[worker_id]
                self.up[worker_id][request.request_id] = request
            case AbortOn(worker_id, leg_ids):
                # The worker answers an abort later, by a rule.
                assert set(leg_ids) <= self.machine.fleet.workers[worker_id].ghosts.keys()
            case EmitDelta(request_id, delta):
                assert request_id in self.open
                assert request_id not in self.embedded
                assert delta.embedding is not None
                self.embedded.add(request_id)
            case FinishRequest(request_id, summary):
                assert request_id in self.embedded
                assert summary.outcome == "ok"
                self.end(request_id)
            case FailRequest(request_id, error, summary):
                assert summary.outcome == error.code
                self.end(request_id)
            case ClientGone(request_id, _):
                self.end(request_id)
            case _:
                raise AssertionError(f"{effect} is none of an embedding's")

    def end(self, request_id: str) -> None:
        assert request_id in self.open
        self.open.remove(request_id)
        self.ended.add(request_id)

    def legs(self, worker_id: str) -> list[str]:
        return sorted(self.up.get(worker_id, {}))

    @initialize()
    def one_worker(self) -> None:
        self.join("e0")

    @rule(worker_id=workers)
    def join(self, worker_id: str) -> None:
        self.epochs += 1
        if worker_id not in self.up:
            self.up[worker_id] = {}
            self.feed(WorkerReady(worker_id, embedding_worker(worker_id, self.epochs)))

    @rule(
        length=st.sampled_from((1, 30, 90)),
        priority=st.sampled_from((0, 1)),
        patience=st.sampled_from((None, 3.0)),
        tenant=st.sampled_from("ab"),
    )
    def arrive(self, length: int, priority: int, patience: float | None, tenant: str) -> None:
        self.count += 1
        name = f"r{self.count}"
        deadline_s = None if patience is None else self.now + patience
        request = Request(
            name,
            "m",
            token_ids(range(length)),
            arrival_s=self.now,
            deadline_s=deadline_s,
            priority=priority,
            tenant=tenant,
            task=Task.EMBED,
        )
        before, code = self.machine.in_flight, ""
        self.open.add(name)
        try:
            self.feed(RequestArrived(request))
        except CapacityError as refusal:
            self.open.remove(name)
            code = refusal.code
        if self.closed:
            assert code == "shutting_down"
        elif before >= LIMITS.max_in_flight:
            assert code == "queue_full"
        else:
            assert code in {"", *REFUSALS}
        assert not code or self.machine.in_flight == before

    @rule(data=st.data())
    def arrive_twice(self, data: st.DataObject) -> None:
        if not self.open or self.closed:
            return
        name = data.draw(st.sampled_from(sorted(self.open)))
        with pytest.raises(RequestError) as caught:
            self.machine.handle(RequestArrived(Request(name, "m", token_ids((1,)))), self.now)
        assert caught.value.code == "duplicate_request"

    @rule(worker_id=workers, data=st.data(), code=st.none() | CODES)
    def answer(self, worker_id: str, data: st.DataObject, code: str | None) -> None:
        legs = self.legs(worker_id)
        if not legs or self.machine.fleet.workers[worker_id].interrupted:
            return
        leg_id = data.draw(st.sampled_from(legs))
        request = self.up[worker_id].pop(leg_id)
        usage = Usage(prompt_tokens=len(request.tokens))
        if code is None:
            delta = Delta(
                leg_id, 0, finish=FinishReason.STOP, last=True, usage=usage, embedding=array("f", (1.0,))
            )
        else:
            delta = Delta(
                leg_id, 0, finish=FinishReason.ERROR, last=True, usage=usage, error=code, error_message=code
            )
        load = EngineLoad(running=len(self.up[worker_id]))
        self.feed(StepReceived(worker_id, StepBatch((delta,), load)))

    @rule(worker_id=workers)
    def lose(self, worker_id: str) -> None:
        if self.up.pop(worker_id, None) is not None:
            self.feed(WorkerLost(worker_id, "gone"))

    @rule(worker_id=workers)
    def interrupt(self, worker_id: str) -> None:
        if worker_id in self.up:
            self.feed(WorkerInterrupted(worker_id))

    @rule(worker_id=workers)
    def resume(self, worker_id: str) -> None:
        known = self.machine.fleet.workers.get(worker_id)
        if known is not None:
            self.feed(WorkerReady(worker_id, known.identity))

    @rule(worker_id=workers, restored=st.booleans())
    def drain(self, worker_id: str, restored: bool) -> None:
        if worker_id in self.up:
            self.feed(WorkerRestored(worker_id) if restored else WorkerDraining(worker_id, "asked to"))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.open:
            self.feed(RequestCancelled(data.draw(st.sampled_from(sorted(self.open)))))

    @rule(seconds=st.sampled_from((0.1, 1.0, 11.0)))
    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (due := self.machine.next_wakeup()) is not None and due <= until:
            self.now = max(self.now, due)
            self.feed(TimerTick())
        self.now = until

    @precondition(lambda self: self.count > 8)
    @rule()
    def shut_down(self) -> None:
        self.closed = True
        self.feed(ShuttingDown())
        assert not self.open

    @invariant()
    def in_order(self) -> None:
        self.machine.validate_state()
        assert self.machine.in_flight == len(self.open)
        for worker in self.machine.fleet.workers.values():
            legs = len(worker.legs)
            assert legs <= 2 * BATCH.requests
            assert worker.legs.keys() <= self.up[worker.worker_id].keys()

    @invariant()
    def nothing_waits_for_an_idle_worker_that_it_may_have(self) -> None:
        fleet = self.machine.fleet
        avoided = fleet.health.avoided(self.now)
        idle = {name for name, worker in fleet.workers.items() if worker.state == "ready" and not worker.legs}
        for avoids in self.machine.waiting():
            assert not idle - avoided - avoids

    def teardown(self) -> None:
        """Whatever has happened, a worker that answers everything brings all to an end."""
        for worker_id in list(self.up):
            self.lose(worker_id)
        self.join("e2")
        for _ in range(4 * LIMITS.max_in_flight):
            for leg_id in self.legs("e2"):
                del self.up["e2"][leg_id]
                done = Delta(leg_id, 0, finish=FinishReason.STOP, last=True, embedding=array("f", (1.0,)))
                self.feed(StepReceived("e2", StepBatch((done,), EngineLoad())))
            self.wait(0.1)
        assert not self.open
        assert self.machine.accounting().in_flight == 0
        self.machine.validate_state()


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=50, deadline=None)


def test_what_was_cancelled_behind_one_that_waits_is_not_kept() -> None:
    machine = EmbeddingMachine(EmbeddingFleet({"vectors": BATCH}, random.Random(7)), LIMITS)
    machine.handle(RequestArrived(Request("first", "m", token_ids((1,)), task=Task.EMBED)), 0.0)
    for n in range(500):
        later = Request(f"r{n}", "m", token_ids((1,)), priority=1, task=Task.EMBED)
        machine.handle(RequestArrived(later), 0.0)
        machine.handle(RequestCancelled(later.request_id), 0.0)
    machine.validate_state()
    assert machine.queued == 1
