"""For any order of events, every request ends once, streams are complete, and nothing leaks.

Workers here are a few dictionaries that obey the engine's contract, and break it on purpose where the
rule's name says so. Alphabets are tiny: two prefill workers, two decode workers, one that does both.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvasir.core.errors import CapacityError, RequestError
from kvasir.core.identity import KvLayout, WorkerIdentity
from kvasir.core.requests import (
    Continuation,
    Delta,
    EngineLoad,
    EngineRequest,
    FinishReason,
    KvHandoff,
    Leg,
    Request,
    Role,
    Sampling,
    StepBatch,
    Timings,
    Usage,
    token_ids,
)
from kvasir_router.admission import AdmissionRules, BrownoutRules, BrownoutStep
from kvasir_router.build import hash_blocks
from kvasir_router.decide import CostRates, RateBook, make_policy
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.index import FleetIndex
from kvasir_router.requests.continuation import ContinuationMode, way_on
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
from kvasir_router.requests.machine import MachineLimits, RequestMachine

ROLES = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE, "b0": Role.BOTH}
LIMITS = MachineLimits(max_in_flight=5, max_retries=2, queue_timeout_s=13.0)


def identity(worker_id: str, role: Role, epoch: int, ranks: int) -> WorkerIdentity:
    return WorkerIdentity(
        worker_id=worker_id,
        epoch=epoch,
        pool=role.value,
        role=role,
        model="m",
        revision="",
        tokenizer_digest="t",
        max_model_len=100,
        kv=KvLayout(4, "f32", "nhd", 1, 1, 1, 64),
        kv_blocks=20,
        engine="fake",
        engine_version="0",
        transfer="fake",
        data_parallel_size=ranks,
    )


def tokens_from(offset: int, count: int) -> tuple[int, ...]:
    """What every engine says at these places."""
    return tuple(7 + at % 3 for at in range(offset, offset + count))


@dataclass
class FakeWorker:
    """The truth about one live worker."""

    identity: WorkerIdentity
    legs: dict[str, EngineRequest] = field(default_factory=dict)
    sent: dict[str, list[int]] = field(default_factory=dict)
    done: dict[str, set[int]] = field(default_factory=dict)
    leases: set[str] = field(default_factory=set)
    early: dict[str, KvHandoff] = field(default_factory=dict)
    used_ids: set[str] = field(default_factory=set)


class Histories(RuleBasedStateMachine):
    disaggregation = "always"
    admits = AdmissionRules(max_queue=2)

    def __init__(self) -> None:
        super().__init__()
        policy = make_policy("cost", self.disaggregation, random.Random(7))
        index = FleetIndex(capacity_blocks=60, predicted_blocks=30, predicted_ttl_s=20.0)
        self.fleet = Fleet(
            policy,
            index,
            RateBook(lambda _: CostRates()),
            hash_blocks=hash_blocks,
            expected_output_tokens=8,
        )
        self.machine = RequestMachine(self.fleet, LIMITS, self.admits)
        self.now = 0.0
        self.count = 0
        self.epochs = 0
        self.offers = 0
        self.unoffered: list[tuple[str, str]] = []
        self.up: dict[str, FakeWorker] = {}
        self.open: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.submissions: dict[str, int] = {}

    # -- the world around the machine --

    def feed(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        for effect in effects:
            self.perform(effect)
        return effects

    def perform(self, effect: Effect) -> None:
        match effect:
            case SubmitTo(worker_id, request):
                worker = self.up[worker_id]
                assert request.request_id not in worker.legs
                assert (request.handoff is not None) == (request.leg is Leg.DECODE)
                if request.handoff is not None:
                    assert any(request.handoff.lease_id in up.leases for up in self.up.values())
                name = request.request_id.partition("~")[0]
                self.check_start(name, request)
                known = request.continuation.output_tokens if request.continuation else 0
                worker.legs[request.request_id] = request
                worker.sent[request.request_id] = [known] * request.sampling.n
                worker.done[request.request_id] = set()
                self.submissions[name] = self.submissions.get(name, 0) + 1
            case AbortOn(worker_id, leg_ids):
                assert worker_id in self.up
                assert all(leg_id in self.up[worker_id].legs for leg_id in leg_ids)
            case ReleaseOn(worker_id, lease_ids):
                self.up[worker_id].leases.difference_update(lease_ids)
            case EmitDelta(request_id, delta):
                assert delta.request_id == request_id
                assert delta.offset == self.open[request_id][delta.index], "a token was lost or repeated"
                assert delta.token_ids == tokens_from(delta.offset, len(delta.token_ids)), "a wrong token"
                assert len(delta.text) == len(delta.token_ids), "text was lost or repeated"
                self.open[request_id][delta.index] += len(delta.token_ids)
            case FinishRequest(request_id) | FailRequest(request_id) | ClientGone(request_id):
                del self.open[request_id]
                self.ended.add(request_id)

    def check_start(self, name: str, leg: EngineRequest) -> None:
        """A leg computes the prompt, or the prompt and what the client has, and is told which."""
        had, prompt = self.open[name], self.prompts[name]
        way = way_on(leg.sampling)
        assert not any(had) or way is not ContinuationMode.NEITHER
        extends = any(had) and way is ContinuationMode.EXTEND
        output = tokens_from(0, had[0]) if extends else ()
        assert tuple(leg.tokens) == (*prompt, *output)
        expected = Continuation(had[0], had[0]) if extends and leg.leg is not Leg.PREFILL else None
        assert leg.continuation == expected

    def say(self, worker_id: str, delta: Delta) -> None:
        worker = self.up[worker_id]
        if delta.last:
            worker.legs.pop(delta.request_id)
            offered = worker.early.pop(delta.request_id, None)
            if offered is not None and delta.handoff is None:
                worker.leases.discard(offered.lease_id)
        if delta.handoff is not None:
            worker.leases.add(delta.handoff.lease_id)
        load = EngineLoad(running=len(worker.legs), kv_usage=0.5) if self.count % 2 else None
        self.feed(StepReceived(worker_id, StepBatch((delta,), load)))

    def some_leg(self, data: st.DataObject, kinds: set[Leg]) -> tuple[str, EngineRequest]:
        legs = [(w, leg) for w, up in self.up.items() for leg in up.legs.values() if leg.leg in kinds]
        return data.draw(st.sampled_from(legs))

    def has(self, *kinds: Leg) -> bool:
        return any(leg.leg in kinds for up in self.up.values() for leg in up.legs.values())

    @initialize()
    def workers_start(self) -> None:
        for worker_id in ROLES:
            self.worker_is_ready(worker_id, again=False)

    # -- requests --

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        n=st.sampled_from([1, 1, 1, 2]),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.sampled_from([None, 3]),
        patience=st.none() | st.integers(1, 20),
        tenant=st.sampled_from("ab"),
        priority=st.sampled_from([0, 0, 1500]),
    )
    def arrive(
        self,
        *,
        prompt: list[int],
        n: int,
        temperature: float,
        seed: int | None,
        patience: int | None,
        tenant: str,
        priority: int,
    ) -> None:
        self.count += 1
        name = f"r{self.count}"
        request = Request(
            name,
            "m",
            token_ids(prompt),
            Sampling(n=n, max_tokens=5, temperature=temperature, seed=seed),
            arrival_s=self.now,
            deadline_s=None if patience is None else self.now + patience,
            tenant=tenant,
            priority=priority,
        )
        before = self.machine.in_flight
        self.open[name] = [0] * n
        self.prompts[name] = prompt
        try:
            self.feed(RequestArrived(request))
        except CapacityError:
            del self.open[name]
            assert self.machine.in_flight == before

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def arrive_twice(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        try:
            self.feed(RequestArrived(Request(name, "m", token_ids([1]))))
        except (RequestError, CapacityError):
            return
        raise AssertionError("a request id was accepted twice")

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.feed(RequestCancelled(data.draw(st.sampled_from(sorted(self.open)))))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def cancel_what_has_ended(self, data: st.DataObject) -> None:
        assert self.feed(RequestCancelled(data.draw(st.sampled_from(sorted(self.ended))))) == []

    @rule(pause=st.integers(1, 4))
    def time_passes(self, pause: int) -> None:
        self.now += pause
        self.feed(TimerTick())
        wakeup = self.machine.next_wakeup()
        assert wakeup is None or wakeup > self.now

    # -- membership --

    @rule(worker_id=st.sampled_from(sorted(ROLES)), again=st.booleans())
    def worker_is_ready(self, worker_id: str, again: bool) -> None:
        if again and worker_id in self.up:
            self.feed(WorkerReady(worker_id, self.up[worker_id].identity))
            return
        self.epochs += 1
        ranks = 2 if worker_id.endswith("1") else 1
        self.up[worker_id] = FakeWorker(identity(worker_id, ROLES[worker_id], self.epochs, ranks))
        self.feed(WorkerReady(worker_id, self.up[worker_id].identity))

    @rule(worker_id=st.sampled_from(sorted(ROLES)))
    def worker_is_lost(self, worker_id: str) -> None:
        self.up.pop(worker_id, None)
        self.feed(WorkerLost(worker_id, "gone"))

    @rule(worker_id=st.sampled_from(sorted(ROLES)))
    def worker_is_interrupted(self, worker_id: str) -> None:
        self.feed(WorkerInterrupted(worker_id))

    @rule(worker_id=st.sampled_from(sorted(ROLES)), back=st.booleans())
    def worker_drains(self, worker_id: str, back: bool) -> None:
        self.feed(WorkerRestored(worker_id) if back else WorkerDraining(worker_id, "scale down"))

    # -- engines --

    def offer(self, worker_id: str, name: str) -> KvHandoff:
        """A lease as no other one was."""
        self.offers += 1
        return KvHandoff(f"{name}/{worker_id}/{self.offers}", 1, 4.0, 1, b"")

    @precondition(lambda self: self.has(Leg.PREFILL))
    @rule(
        data=st.data(), how=st.sampled_from(["done", "done", "early", "token", "no_kv", "error", "refused"])
    )
    def prefill_leg(self, data: st.DataObject, how: str) -> None:
        worker_id, leg = self.some_leg(data, {Leg.PREFILL})
        name, size = leg.request_id, len(leg.tokens)
        early = self.up[worker_id].early
        if how == "token":
            self.say(worker_id, Delta(name, 0, (9,)))
        elif how == "early":
            early.setdefault(name, self.offer(worker_id, name))
            self.say(worker_id, Delta(name, 0, handoff=early[name]))
        elif how in ("error", "refused"):
            code = "worker_failed" if how == "error" else "context_length_exceeded"
            self.say(worker_id, Delta(name, 0, finish=FinishReason.ERROR, last=True, error=code))
        else:
            handoff = (early.get(name) or self.offer(worker_id, name)) if how == "done" else None
            usage, timings = Usage(size, 0, 0, 0, 1), Timings(prefill_s=0.01)
            finish = FinishReason.LENGTH
            self.say(
                worker_id,
                Delta(name, 0, (9,), finish=finish, last=True, usage=usage, timings=timings, handoff=handoff),
            )

    @precondition(lambda self: self.has(Leg.DECODE, Leg.FULL))
    @rule(data=st.data(), tokens=st.integers(0, 2), finish=st.booleans())
    def decode_leg(self, data: st.DataObject, tokens: int, finish: bool) -> None:
        worker_id, leg = self.some_leg(data, {Leg.DECODE, Leg.FULL})
        name, worker = leg.request_id, self.up[worker_id]
        choices = set(range(leg.sampling.n)) - worker.done[name]
        index = data.draw(st.sampled_from(sorted(choices)))
        last = finish and len(choices) == 1
        offset = worker.sent[name][index]
        worker.sent[name][index] += tokens
        if finish:
            worker.done[name].add(index)
        self.say(
            worker_id,
            Delta(
                name,
                offset,
                tokens_from(offset, tokens),
                "x" * tokens,
                index,
                finish=FinishReason.STOP if finish else None,
                last=last,
                usage=Usage(len(leg.tokens), output_tokens=5) if last else None,
                timings=Timings(decode_s=0.1) if last else None,
            ),
        )

    @precondition(lambda self: self.has(Leg.DECODE, Leg.FULL))
    @rule(
        data=st.data(),
        finish=st.sampled_from([FinishReason.ERROR, FinishReason.ABORT]),
        error=st.sampled_from([None, "transfer_failed"]),
        last=st.booleans(),
    )
    def decode_leg_fails(
        self, data: st.DataObject, finish: FinishReason, error: str | None, last: bool
    ) -> None:
        worker_id, leg = self.some_leg(data, {Leg.DECODE, Leg.FULL})
        self.say(worker_id, Delta(leg.request_id, 0, finish=finish, error=error, last=last))

    @precondition(lambda self: self.has(Leg.DECODE, Leg.FULL))
    @rule(data=st.data(), offset=st.integers(-1, 6), index=st.integers(-1, 2), last=st.booleans())
    def decode_leg_says_nonsense(self, data: st.DataObject, offset: int, index: int, last: bool) -> None:
        worker_id, leg = self.some_leg(data, {Leg.DECODE, Leg.FULL})
        sent = self.up[worker_id].sent[leg.request_id]
        if 0 <= index < len(sent) and offset == sent[index]:
            sent[index] += 1
        tokens = tokens_from(offset, 1)
        self.say(worker_id, Delta(leg.request_id, offset, tokens, "x", index=index, last=last))

    @rule(worker_id=st.sampled_from(sorted(ROLES)))
    def worker_speaks_of_an_unknown_leg(self, worker_id: str) -> None:
        self.feed(StepReceived(worker_id, StepBatch((Delta("nobody", 0, (1,)),))))

    # -- what must hold --

    @invariant()
    def state_is_valid(self) -> None:
        self.machine.validate_state()

    @invariant()
    def requests_in_flight_are_those_that_have_not_ended(self) -> None:
        assert self.machine.in_flight == len(self.open)

    @invariant()
    def every_lease_has_an_owner(self) -> None:
        assert sum(len(up.leases) for up in self.up.values()) == self.machine.leases

    @invariant()
    def every_leg_is_known_or_was_aborted(self) -> None:
        for worker_id, up in self.up.items():
            known = self.fleet.workers[worker_id]
            assert up.legs.keys() >= known.legs.keys()

    @invariant()
    def starts_are_bounded(self) -> None:
        for state in self.machine._states.values():
            assert state.retries <= LIMITS.max_retries
            assert state.migrations <= LIMITS.max_migrations

    def teardown(self) -> None:
        for worker_id, up in self.up.items():
            for name in [name for name in up.legs if name not in self.fleet.workers[worker_id].legs]:
                self.say(worker_id, Delta(name, 0, finish=FinishReason.ABORT, last=True))
        self.feed(ShuttingDown())
        for worker_id, up in self.up.items():
            for name in list(up.legs):
                self.say(worker_id, Delta(name, 0, finish=FinishReason.ABORT, last=True))
        self.state_is_valid()
        assert not self.open
        assert self.machine.in_flight == self.machine.queued == self.machine.leases == 0
        assert not self.fleet.accounted()
        assert all(not worker.legs and not worker.ghosts for worker in self.fleet.workers.values())
        assert not any(up.leases for up in self.up.values())


class EarlyHistories(Histories):
    """Every prompt is offered before it is computed."""

    def perform(self, effect: Effect) -> None:
        super().perform(effect)
        if isinstance(effect, SubmitTo) and effect.request.leg is Leg.PREFILL:
            self.unoffered.append((effect.worker_id, effect.request.request_id))

    def feed(self, event: Event) -> list[Effect]:
        effects = super().feed(event)
        while self.unoffered:
            worker_id, name = self.unoffered.pop()
            up = self.up[worker_id]
            if name in up.legs:
                up.early[name] = self.offer(worker_id, name)
                self.say(worker_id, Delta(name, 0, handoff=up.early[name]))
        return effects


class AutoHistories(Histories):
    disaggregation = "auto"


class AggregatedHistories(Histories):
    disaggregation = "never"


class CrowdedHistories(Histories):
    """There is little room, shared by rules of every kind."""

    disaggregation = "auto"
    admits = AdmissionRules(
        max_queue=4,
        max_queue_tokens=20,
        max_tenant_queue=3,
        headroom=0.5,
        spare=0.2,
        ahead_s=3e-4,
        ahead_shared_s=1e-4,
        patience=1.0,
        itl_slack=1.0,
        long_tokens=6,
        long_share=0.4,
        ageing_s=5.0,
        seats={"prefill": 3, "decode": 3, "both": 2},
        brownout=BrownoutRules((BrownoutStep(cap_max_tokens=3), BrownoutStep(shed=1)), leave_s=3.0),
    )


TestAlways = Histories.TestCase
TestEarly = EarlyHistories.TestCase
TestAuto = AutoHistories.TestCase
TestNever = AggregatedHistories.TestCase
TestCrowded = CrowdedHistories.TestCase
for case in (TestAlways, TestEarly, TestAuto, TestNever, TestCrowded):
    case.settings = settings(stateful_step_count=50, deadline=None)
