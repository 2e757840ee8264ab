"""Streams whose worker is lost, silent or slow, in the request machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir.core.errors import RequestError
from kvasir.core.requests import (
    Continuation,
    Delta,
    FinishReason,
    Leg,
    Request,
    Role,
    Sampling,
    Usage,
    token_ids,
)
from kvasir_router.requests.events import (
    AbortOn,
    Effect,
    EmitDelta,
    FailRequest,
    FinishRequest,
    RequestArrived,
    SubmitTo,
    TimerTick,
    WorkerDraining,
    WorkerInterrupted,
    WorkerLost,
    WorkerReady,
)

from .test_machine import MakeIdentity, Stage, has, only

GREEDY = Sampling(temperature=0.0, max_tokens=8)


@pytest.fixture
def stage(make_identity: MakeIdentity) -> Stage:
    made = Stage(make_identity, "never")
    made.ready(b0=Role.BOTH, b1=Role.BOTH)
    return made


def begin(stage: Stage, sampling: Sampling = GREEDY, name: str = "r") -> str:
    """A stream of which the client has three tokens, and where it runs."""
    request = Request(name, "m", token_ids(range(20)), sampling)
    worker = only(stage.tell(RequestArrived(request)), SubmitTo).worker_id
    stage.say(worker, Delta(name, 0, (7, 8), " a b"))
    stage.say(worker, Delta(name, 2, (9,), " c"))
    return worker


def other(worker: str) -> str:
    return "b1" if worker == "b0" else "b0"


def test_a_stream_goes_on_elsewhere_from_prompt_and_output(stage: Stage) -> None:
    worker = begin(stage)
    leg = only(stage.tell(WorkerLost(worker, "gone")), SubmitTo)
    assert leg.worker_id == other(worker)
    assert list(leg.request.tokens) == [*range(20), 7, 8, 9]
    assert leg.request.continuation == Continuation(output_tokens=3, text_length=6)
    assert leg.request.sampling == GREEDY
    emitted = only(stage.say(leg.worker_id, Delta(leg.request.request_id, 3, (4,), " d")), EmitDelta)
    assert (emitted.delta.request_id, emitted.delta.offset) == ("r", 3)


def test_usage_counts_the_clients_prompt_and_all_of_its_output(stage: Stage) -> None:
    worker = begin(stage)
    leg = only(stage.tell(WorkerLost(worker, "gone")), SubmitTo)
    end = Delta(
        leg.request.request_id, 3, (4, 5), finish=FinishReason.STOP, last=True, usage=Usage(23, 22, 0, 0, 2)
    )
    effects = stage.say(leg.worker_id, end)
    summary = only(effects, FinishRequest).summary
    assert summary.usage == Usage(prompt_tokens=20, cached_tokens=20, output_tokens=5)
    assert only(effects, EmitDelta).delta.usage == summary.usage
    assert (summary.migrations, summary.retries) == (1, 0)


def test_a_stream_apart_is_prefilled_again_with_its_output_and_then_decoded(
    make_identity: MakeIdentity,
) -> None:
    stage = Stage(make_identity)
    stage.ready(p0=Role.PREFILL, d0=Role.DECODE, d1=Role.DECODE)
    stage.arrive()
    decode = only(stage.prefilled("p0"), SubmitTo)
    stage.say(decode.worker_id, Delta("r", 0, (7,), " a"))
    again = only(stage.tell(WorkerLost(decode.worker_id, "gone")), SubmitTo).request
    assert (again.leg, again.continuation) == (Leg.PREFILL, None)
    assert list(again.tokens) == [*range(20), 7]
    on = only(stage.prefilled("p0", again.request_id), SubmitTo)
    assert (on.request.leg, on.request.continuation) == (Leg.DECODE, Continuation(1, 2))
    assert on.worker_id != decode.worker_id


def test_a_broken_connection_that_comes_back_in_time_moves_nothing(stage: Stage) -> None:
    worker = begin(stage)
    assert not stage.tell(WorkerInterrupted(worker))
    stage.now = 0.4
    assert not has(stage.tell(TimerTick()), SubmitTo)
    stage.tell(WorkerReady(worker, stage.machine.fleet.workers[worker].identity))
    stage.now = 5.0
    assert not has(stage.tell(TimerTick()), SubmitTo)
    assert has(stage.say(worker, Delta("r", 3, (4,))), EmitDelta)


def test_a_silent_workers_streams_go_on_elsewhere_and_its_own_later_words_count_for_nothing(
    stage: Stage,
) -> None:
    worker = begin(stage)
    stage.tell(WorkerInterrupted(worker))
    stage.now = stage.machine.next_wakeup() or 0.0
    effects = stage.tell(TimerTick())
    assert stage.now == pytest.approx(0.5)
    assert only(effects, AbortOn) == AbortOn(worker, ("r",))
    assert only(effects, SubmitTo).worker_id == other(worker)
    stage.tell(WorkerReady(worker, stage.machine.fleet.workers[worker].identity))
    assert not stage.say(worker, Delta("r", 3, (4,), " d"))


def test_a_stream_stays_on_a_silent_worker_while_nobody_else_can_take_it(stage: Stage) -> None:
    worker = begin(stage)
    stage.tell(WorkerLost(other(worker), "gone"))
    stage.tell(WorkerInterrupted(worker))
    stage.now = 0.5
    assert not stage.tell(TimerTick())
    stage.ready(b2=Role.BOTH)
    stage.now = stage.machine.next_wakeup() or 0.0
    assert only(stage.tell(TimerTick()), SubmitTo).worker_id == "b2"


def test_a_draining_worker_whose_connection_ends_is_not_waited_for(stage: Stage) -> None:
    worker = begin(stage)
    stage.tell(WorkerDraining(worker, "scale down"))
    assert only(stage.tell(WorkerInterrupted(worker)), SubmitTo).worker_id == other(worker)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=3, max_tokens=8),
        Sampling(temperature=0.0, presence_penalty=0.5, max_tokens=8),
    ],
)
def test_what_depends_on_more_than_the_tokens_is_made_anew_and_only_the_rest_is_passed_on(
    stage: Stage, sampling: Sampling
) -> None:
    worker = begin(stage, sampling)
    leg = only(stage.tell(WorkerLost(worker, "gone")), SubmitTo)
    assert list(leg.request.tokens) == list(range(20))
    assert leg.request.continuation is None
    name = leg.request.request_id
    assert not has(stage.say(leg.worker_id, Delta(name, 0, (7,), " a")), EmitDelta)
    passed = only(stage.say(leg.worker_id, Delta(name, 1, (8, 9, 4), " b c d")), EmitDelta).delta
    assert (passed.offset, passed.token_ids, passed.text) == (3, (4,), " d")
    end = Delta(name, 4, (5,), " e", finish=FinishReason.STOP, last=True, usage=Usage(20, 0, 0, 0, 5))
    assert only(stage.say(leg.worker_id, end), FinishRequest).summary.usage.output_tokens == 5


def test_an_engine_that_does_not_repeat_itself_ends_the_stream_with_a_clean_error(stage: Stage) -> None:
    worker = begin(stage, Sampling(temperature=1.0, seed=3))
    leg = only(stage.tell(WorkerLost(worker, "gone")), SubmitTo)
    failed = only(stage.say(leg.worker_id, Delta(leg.request.request_id, 0, (7, 1))), FailRequest)
    assert failed.error.code == "worker_lost"
    assert "could not be repeated" in failed.error.message


def test_a_stream_that_cannot_go_on_exactly_ends_and_says_why(stage: Stage) -> None:
    worker = begin(stage, Sampling(temperature=1.0, frequency_penalty=0.1))
    failed = only(stage.tell(WorkerLost(worker, "gone")), FailRequest)
    assert failed.error.code == "worker_lost"
    assert "without a seed and with penalties" in failed.error.message


def test_a_request_that_brings_down_each_worker_it_meets_ends(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, "never", max_migrations=2)
    stage.ready(**{f"b{number}": Role.BOTH for number in range(5)})
    worker, lost = begin(stage), 0
    effects: list[Effect] = []
    while not has(effects, FailRequest):
        effects = stage.tell(WorkerLost(worker, "gone"))
        lost += 1
        worker = next((each.worker_id for each in effects if isinstance(each, SubmitTo)), "")
    assert lost == 3


def test_the_loss_of_a_worker_with_many_streams_is_free_of_the_retry_budget(
    make_identity: MakeIdentity,
) -> None:
    stage = Stage(make_identity, "never", retry_budget=0)
    stage.ready(b0=Role.BOTH)
    for number in range(20):
        assert begin(stage, name=f"r{number}") == "b0"
    stage.ready(b1=Role.BOTH)
    effects = stage.tell(WorkerLost("b0", "gone"))
    assert sum(isinstance(effect, SubmitTo) for effect in effects) == 20


def test_failures_everywhere_cost_no_more_starts_than_the_budget_has(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, "never")
    stage.ready(b0=Role.BOTH, b1=Role.BOTH, b2=Role.BOTH)
    started = 0
    for number in range(200):
        effects = stage.tell(RequestArrived(Request(f"r{number}", "m", token_ids(range(20)), GREEDY)))
        while (leg := next((each for each in effects if isinstance(each, SubmitTo)), None)) is not None:
            started += 1
            refused = Delta(
                leg.request.request_id, 0, finish=FinishReason.ERROR, last=True, error="worker_overloaded"
            )
            effects = stage.say(leg.worker_id, refused)
        assert has(effects, FailRequest)
    assert 200 < started <= 240


def test_a_prompt_of_which_nothing_comes_is_taken_back_once_and_started_elsewhere(
    make_identity: MakeIdentity,
) -> None:
    stage = Stage(make_identity, "never")
    stage.ready(b0=Role.BOTH, b1=Role.BOTH, b2=Role.BOTH)
    first = only(
        stage.tell(RequestArrived(Request("r", "m", token_ids(range(20)), GREEDY))), SubmitTo
    ).worker_id
    moves = []
    for second in range(1, 60):
        stage.now = float(second)
        effects = stage.tell(TimerTick())
        moves += [effect for effect in effects if isinstance(effect, SubmitTo)]
        if has(effects, AbortOn):
            assert only(effects, AbortOn) == AbortOn(first, ("r",))
    (move,) = moves
    assert move.worker_id != first
    done = Delta(move.request.request_id, 0, (7,), finish=FinishReason.STOP, last=True, usage=Usage())
    assert only(stage.say(move.worker_id, done), FinishRequest).summary.migrations == 0


def test_a_prompt_is_not_taken_back_where_there_is_no_other_place(make_identity: MakeIdentity) -> None:
    stage = Stage(make_identity, "never")
    stage.ready(b0=Role.BOTH)
    stage.tell(RequestArrived(Request("r", "m", token_ids(range(20)), GREEDY)))
    stage.now = 50.0
    assert not stage.tell(TimerTick())


def test_a_stream_whose_engine_fails_goes_on_too(stage: Stage) -> None:
    worker = begin(stage)
    failed = Delta("r", 3, finish=FinishReason.ERROR, last=True, error="worker_failed")
    leg = only(stage.say(worker, failed), SubmitTo)
    assert leg.worker_id == other(worker)
    assert leg.request.continuation == Continuation(3, 6)


def test_what_ran_in_an_engine_that_died_goes_on_free_of_the_retry_budget(
    make_identity: MakeIdentity,
) -> None:
    stage = Stage(make_identity, "never", retry_budget=0)
    stage.ready(b0=Role.BOTH)
    for number in range(20):
        stage.tell(RequestArrived(Request(f"r{number}", "m", token_ids(range(20)), GREEDY)))
    stage.ready(b1=Role.BOTH)
    dead = [
        Delta(f"r{number}", 0, finish=FinishReason.ERROR, last=True, error="engine_dead")
        for number in range(20)
    ]
    effects = stage.say("b0", *dead)
    assert sum(isinstance(effect, SubmitTo) for effect in effects) == 20


def test_several_choices_go_on_each_from_its_own_place(stage: Stage) -> None:
    sampling = replace(GREEDY, n=2)
    worker = only(
        stage.tell(RequestArrived(Request("r", "m", token_ids(range(20)), sampling))), SubmitTo
    ).worker_id
    stage.say(worker, Delta("r", 0, (1, 2), "ab", finish=FinishReason.STOP), Delta("r", 0, (4,), "d", 1))
    leg = only(stage.tell(WorkerLost(worker, "gone")), SubmitTo)
    name = leg.request.request_id
    stage.say(leg.worker_id, Delta(name, 0, (1, 2), "ab", finish=FinishReason.STOP))
    end = Delta(
        name, 0, (4, 5), "de", 1, finish=FinishReason.LENGTH, last=True, usage=Usage(20, output_tokens=4)
    )
    effects = stage.say(leg.worker_id, end)
    passed = only(effects, EmitDelta).delta
    assert (passed.index, passed.offset, passed.token_ids, passed.text) == (1, 1, (5,), "e")
    assert only(effects, FinishRequest).summary.usage.output_tokens == 4


def test_a_stream_whose_grammar_takes_too_long_goes_to_no_other_worker(stage: Stage) -> None:
    worker = begin(stage)
    code = "grammar_too_costly"
    ended = Delta("r", 3, finish=FinishReason.ERROR, last=True, error=code, error_message="too long")
    effects = stage.say(worker, ended)
    assert not has(effects, SubmitTo)
    error = only(effects, FailRequest).error
    assert isinstance(error, RequestError)
    assert (error.status, error.code) == (400, code)
