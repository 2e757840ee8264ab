"""A router's load reports, and how it applies the planner's response."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from kvasir.core.demand import Traffic
from kvasir.core.errors import CapacityError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import EngineLoad, Request, Role, SloClass, Usage, token_ids
from kvasir.ports.router import RequestSummary
from kvasir_router.admission import AdmissionRules
from kvasir_router.build import hash_blocks
from kvasir_router.decide import CostRates, RateBook, make_policy
from kvasir_router.demand import DemandBook, figures_of
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.fleet.work import Worker
from kvasir_router.index import FleetIndex
from kvasir_router.requests.events import (
    Effect,
    Event,
    FailRequest,
    PlanReceived,
    RequestArrived,
    SubmitTo,
    TimerTick,
    WorkerDraining,
    WorkerInterrupted,
    WorkerReady,
)
from kvasir_router.requests.machine import MachineLimits, RequestMachine

MakeIdentity = Callable[..., WorkerIdentity]
SLO = SloClass("default", 1.0, 0.1)
MOMENT = {"waiting": 0, "waiting_tokens": 0, "parked": 0, "in_flight": 0}


def ask(name: str = "r", tokens: int = 20) -> Request:
    return Request(name, "m", token_ids(range(tokens)), slo=SLO)


def ended(outcome: str = "ok", ttft_s: float = 0.5, prompt: int = 20, cached: int = 5) -> RequestSummary:
    return RequestSummary(
        request_id="r",
        model="m",
        outcome=outcome,
        arrival_s=0.0,
        finished_s=2.0,
        first_token_s=ttft_s,
        slo=SLO,
        usage=Usage(prompt_tokens=prompt, cached_tokens=cached, output_tokens=101),
    )


# -- counts ------------------------------------------------------------------------------------------


def test_what_arrives_and_ends_is_counted_with_its_tokens() -> None:
    book = DemandBook()
    for _ in range(2):
        book.arrived(ask())
    book.ended(ended())
    book.ended(ended(ttft_s=1.5, cached=10))
    assert book.traffic(waiting=3, waiting_tokens=60, parked=1, in_flight=4) == Traffic(
        arrived=2,
        arrived_tokens=40,
        ended=2,
        prompt_tokens=40,
        computed_tokens=15 + 10,
        computed_squares=15**2 + 10**2,
        output_tokens=202,
        judged=2,
        met=1,
        waiting=3,
        waiting_tokens=60,
        parked=1,
        in_flight=4,
    )


def test_one_that_was_turned_away_arrived_and_was_missed() -> None:
    book = DemandBook()
    book.arrived(ask())
    book.refused()
    assert book.traffic(**MOMENT) == Traffic(arrived=1, arrived_tokens=20, judged=1)


def test_what_failed_was_missed_and_says_nothing_of_what_requests_are_like() -> None:
    book = DemandBook()
    book.ended(ended("worker_lost"))
    assert book.traffic(**MOMENT) == Traffic(judged=1)


@pytest.mark.parametrize("outcome", ["client_closed", "slow_reader", "content_filter"])
def test_what_its_client_or_a_filter_ended_is_nobodys_miss(outcome: str) -> None:
    book = DemandBook()
    book.ended(ended(outcome))
    assert book.traffic(**MOMENT) == Traffic()


def test_a_cache_that_says_more_than_the_prompt_saves_no_more_than_all_of_it() -> None:
    book = DemandBook()
    book.ended(ended(prompt=20, cached=30))
    assert book.traffic(**MOMENT).computed_tokens == 0


# -- a machine and its fleet -------------------------------------------------------------------------


class Stage:
    """A machine with a clock that tests set; every event is followed by a check of all invariants."""

    def __init__(self, make_identity: MakeIdentity, queue_timeout_s: float = 60.0) -> None:
        self.make_identity = make_identity
        self.now = 0.0
        self.fleet = Fleet(
            make_policy("cost", "always", Random(0)),
            FleetIndex(capacity_blocks=1000, predicted_blocks=1000, predicted_ttl_s=1000.0),
            RateBook(lambda _: CostRates()),
            hash_blocks=hash_blocks,
            expected_output_tokens=16,
        )
        self.machine = RequestMachine(
            self.fleet, MachineLimits(queue_timeout_s=queue_timeout_s), AdmissionRules()
        )

    def tell(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        self.machine.validate_state()
        return effects

    def ready(self, **roles: Role) -> list[Effect]:
        return [
            effect
            for worker_id, role in roles.items()
            for effect in self.tell(WorkerReady(worker_id, self.make_identity(worker_id, role)))
        ]

    def arrive(self, name: str = "r") -> list[Effect]:
        return self.tell(RequestArrived(Request(name, "m", token_ids(range(20)))))


@pytest.fixture
def stage(make_identity: MakeIdentity) -> Stage:
    return Stage(make_identity)


def sent(effects: list[Effect]) -> list[str]:
    return [effect.worker_id for effect in effects if isinstance(effect, SubmitTo)]


def test_a_worker_is_told_with_its_rates_its_load_and_the_work_it_is_given(stage: Stage) -> None:
    stage.ready(p=Role.PREFILL)
    worker: Worker = stage.fleet.workers["p"]
    figures = figures_of(worker, None)
    assert (figures.worker_id, figures.pool, figures.role) == ("p", "prefill", Role.PREFILL)
    assert figures.serving
    # A hundred blocks of four tokens.
    assert (figures.kv_tokens, figures.used_tokens, figures.streams, figures.hit_tokens) == (400, 0, 0, 0)
    assert figures.prefill_token_s == 0.0
    stage.fleet.report("p", EngineLoad(running=3, kv_usage=0.25, prefix_hits_tokens=70))
    rates = CostRates(prefill_token_s=0.5, step_fixed_s=0.25)
    figures = figures_of(stage.fleet.workers["p"], rates)
    assert (figures.used_tokens, figures.streams, figures.hit_tokens) == (100, 3, 70)
    assert (figures.prefill_token_s, figures.step_fixed_s) == (0.5, 0.25)


@pytest.mark.parametrize("event", [WorkerInterrupted("p"), WorkerDraining("p", "asked to")])
def test_a_worker_that_takes_nothing_new_does_not_serve(stage: Stage, event: Event) -> None:
    stage.ready(p=Role.PREFILL)
    stage.tell(event)
    assert not figures_of(stage.fleet.workers["p"], None).serving


def test_workers_do_the_part_they_are_given_and_all_others_their_pools(stage: Stage) -> None:
    stage.ready(p1=Role.PREFILL, p2=Role.PREFILL, d=Role.DECODE)
    stage.fleet.assign({"p2": Role.DECODE, "nobody": Role.PREFILL})
    roles = {name: worker.role for name, worker in stage.fleet.workers.items()}
    assert roles == {"p1": Role.PREFILL, "p2": Role.DECODE, "d": Role.DECODE}
    assert figures_of(stage.fleet.workers["p2"], None).role is Role.DECODE
    assert figures_of(stage.fleet.workers["p2"], None).pool == "prefill"
    stage.fleet.assign({"p1": Role.DECODE})
    roles = {name: worker.role for name, worker in stage.fleet.workers.items()}
    assert roles == {"p1": Role.DECODE, "p2": Role.PREFILL, "d": Role.DECODE}


def test_policies_look_anew_only_where_a_part_has_changed(stage: Stage) -> None:
    stage.ready(p=Role.PREFILL)
    before = stage.fleet.changed
    stage.fleet.assign({})
    assert stage.fleet.changed == before
    for _ in range(2):
        stage.fleet.assign({"p": Role.DECODE})
        assert stage.fleet.changed == before + 1


def test_prompts_go_where_they_are_computed_from_now_on(stage: Stage) -> None:
    stage.ready(p=Role.PREFILL, d1=Role.DECODE, d2=Role.DECODE)
    assert sent(stage.arrive("one")) == ["p"]
    stage.tell(PlanReceived({"p": Role.DECODE, "d1": Role.PREFILL}))
    assert sent(stage.arrive("two")) == ["d1"]
    stage.tell(PlanReceived({}))
    assert sent(stage.arrive("three")) == ["p"]


def test_a_request_that_waits_begins_when_a_worker_is_given_its_part(stage: Stage) -> None:
    stage.ready(p1=Role.PREFILL, p2=Role.PREFILL)
    assert sent(stage.arrive()) == []
    assert len(sent(stage.tell(PlanReceived({"p2": Role.DECODE})))) == 1


# -- while nobody serves -----------------------------------------------------------------------------


def test_a_request_waits_for_a_worker_that_is_there_in_time(stage: Stage) -> None:
    stage.tell(PlanReceived({}, ready_in_s=60.0))
    assert stage.arrive() == []
    assert len(sent(stage.ready(p=Role.PREFILL, d=Role.DECODE))) == 1


def test_a_request_is_refused_with_the_time_when_no_worker_is_there_in_time(stage: Stage) -> None:
    stage.tell(PlanReceived({}, ready_in_s=61.0))
    with pytest.raises(CapacityError, match="one is being started, in about 61 s") as refused:
        stage.arrive()
    assert (refused.value.code, refused.value.retry_after_s) == ("no_workers", 61.0)
    assert stage.machine.in_flight == 0


def test_without_a_word_of_the_planner_requests_wait(stage: Stage) -> None:
    assert stage.arrive() == []
    stage.tell(PlanReceived({}, ready_in_s=61.0))
    stage.tell(PlanReceived({}))
    assert stage.arrive("later") == []
    assert stage.machine.in_flight == 2


def test_where_workers_serve_the_word_is_of_no_matter(stage: Stage) -> None:
    stage.ready(p=Role.PREFILL, d=Role.DECODE)
    stage.tell(PlanReceived({}, ready_in_s=1000.0))
    assert sent(stage.arrive()) == ["p"]


@pytest.mark.parametrize(("ready_in_s", "retry_s"), [(None, 5.0), (30.0, 30.0), (0.1, 1.0)])
def test_one_that_has_waited_in_vain_is_told_when_to_come_again(
    stage: Stage, ready_in_s: float | None, retry_s: float
) -> None:
    stage.arrive()
    stage.tell(PlanReceived({}, ready_in_s=ready_in_s))
    stage.now = 60.5
    (failed,) = [effect for effect in stage.tell(TimerTick()) if isinstance(effect, FailRequest)]
    assert isinstance(failed.error, CapacityError)
    assert (failed.error.code, failed.error.retry_after_s) == ("no_workers", retry_s)
