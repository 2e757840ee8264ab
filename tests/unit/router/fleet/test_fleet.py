"""The fleet's accounting, and the view that a policy gets."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvasir.config.spec.deployment import HealthSpec
from kvasir.core.identity import Hardware, WorkerIdentity
from kvasir.core.media.prompts import PromptMedia
from kvasir.core.requests import EngineLoad, Request, Role, Sampling, SloClass, Timings, Usage, token_ids
from kvasir.ports.routing import Candidates, Plan, RequestView, RoutingTarget
from kvasir_router.decide import CostRates, RateBook
from kvasir_router.fleet.decision_log import DecisionLog
from kvasir_router.fleet.fleet import Charges, Fleet
from kvasir_router.fleet.role_gap import RoleGap
from kvasir_router.index import FleetIndex

MakeIdentity = Callable[..., WorkerIdentity]
P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH


class Scripted:
    """A policy that keeps what it was shown, and answers as it is told."""

    name = "scripted"

    def __init__(self) -> None:
        self.answer: Plan | None = None
        self.asked: list[RequestView] = []
        self.seen: list[Candidates] = []

    def decide(self, request: RequestView, candidates: Candidates, now: float) -> Plan | None:
        self.asked.append(request)
        self.seen.append(candidates)
        return self.answer

    def missing(self, prefills: Sequence[bool], decodes: Sequence[bool], worker: Sequence[int]) -> str | None:
        return f"{list(prefills)} {list(decodes)} {list(worker)}"


class Stage:
    """A fleet of which a test sees what policies see."""

    def __init__(self, make_identity: MakeIdentity) -> None:
        self.identity = make_identity
        self.log = DecisionLog(8, policy="scripted", stopwatch=lambda: 0.0, on_decision=lambda _: None)
        self.policy = Scripted()
        self.rates = RateBook()
        index = FleetIndex(capacity_blocks=1000, predicted_blocks=1000, predicted_ttl_s=1000.0)
        self.fleet = Fleet(
            self.policy,
            index,
            self.rates,
            hash_blocks=lambda request, size: array("Q", range(1, len(request.tokens) // size + 1)),
            expected_output_tokens=16,
            gap=RoleGap(after_s=0.0),
            decisions=self.log,
        )

    def join(self, *worker_ids: str, role: Role = B, **known: int) -> None:
        for worker_id in worker_ids:
            self.fleet.add(worker_id, self.identity(worker_id, role, **known), 0.0)

    def look(self, request: Request, **how: object) -> Candidates:
        self.fleet.plan(request, self.fleet.hashes(request), 0.0, **how)  # type: ignore[arg-type]  # by name
        return self.policy.seen[-1]

    def commit(self, request: Request, decode: str, prefill: str | None = None, cached: int = 0) -> Charges:
        source = None if prefill is None else RoutingTarget(prefill)
        plan = Plan(source, RoutingTarget(decode), "test", predicted_cached_tokens=cached)
        return self.fleet.commit(request, self.fleet.hashes(request), plan, 0.0)

    def column(self, name: str, worker_id: str, rank: int = 0) -> int:
        seen = self.look(ask())
        return int(getattr(seen, name)[seen.targets.index(RoutingTarget(worker_id, rank))])


def ask(name: str = "r", tokens: int = 21, model: str = "m", output: int = 4, **known: object) -> Request:
    sampling = Sampling(max_tokens=output)
    return Request(name, model, token_ids(range(tokens)), sampling, **known)  # type: ignore[arg-type]  # by name


@pytest.fixture
def stage(make_identity: MakeIdentity) -> Stage:
    return Stage(make_identity)


def test_a_policy_sees_each_rank_of_each_worker_that_serves(stage: Stage) -> None:
    stage.join("p", role=P)
    stage.join("d", role=D, ranks=2)
    stage.join("other", model="another")  # type: ignore[arg-type]  # goes to the identity
    seen = stage.look(ask())
    assert seen.targets == (RoutingTarget("p"), RoutingTarget("d", 0), RoutingTarget("d", 1))
    assert seen.prefills.tolist() == [True, False, False]
    assert seen.decodes.tolist() == [False, True, True]
    assert seen.worker[1] == seen.worker[2] != seen.worker[0]
    assert seen.kv_tokens.tolist() == [400, 400, 400]
    assert seen.kv_token_bytes.tolist() == [16.0, 16.0, 16.0]


def test_a_policy_sees_the_request_with_its_promise_and_its_session(stage: Stage) -> None:
    stage.join("b")
    promise = SloClass("chat", 0.5, 0.02)
    stage.look(ask("mine", 9, slo=promise, session="s", priority=3, output=100))
    view = stage.policy.asked[-1]
    assert (view.request_id, view.prompt_tokens, view.output_tokens) == ("mine", 9, 16)
    assert (view.slo, view.session, view.priority, list(view.block_hashes)) == (promise, "s", 3, [1, 2])


def test_a_record_has_what_was_known_of_a_cache_at_its_decision(stage: Stage) -> None:
    for worker_id in ("a", "b"):
        stage.fleet.add(worker_id, replace(stage.identity(worker_id), reports_kv=True), 0.0)
    stage.policy.answer = Plan(None, RoutingTarget("a"), "test")

    def known(name: str) -> list[str]:
        stage.look(ask(name))
        record = stage.log.explain(name)
        assert record is not None
        return [place.kv_state for place in record.parts[0].places]

    assert known("first") == known("second") == ["catching_up", "catching_up"]
    stage.fleet.index.demote("a", "it lost a report", 0.0)
    assert known("third") == ["predicted", "catching_up"]
    stage.fleet.remove("b")
    assert known("fourth") == ["predicted"]


def test_a_request_may_name_its_policy(stage: Stage) -> None:
    own = Scripted()
    stage.fleet._policies = {"least_loaded": own}
    stage.join("b")
    stage.look(ask("usual"))
    stage.fleet.plan(ask("mine", policy="least_loaded"), array("Q"), 0.0)
    stage.fleet.plan(ask("unknown", policy="other"), array("Q"), 0.0)
    assert [view.request_id for view in stage.policy.asked] == ["usual", "unknown"]
    assert [view.request_id for view in own.asked] == ["mine"]


def test_an_adapter_is_served_only_where_it_is_loaded(stage: Stage) -> None:
    stage.join("plain")
    stage.join("tuned", adapters=("lora",))  # type: ignore[arg-type]  # goes to the identity
    assert stage.look(ask(adapter="lora")).targets == (RoutingTarget("tuned"),)
    assert len(stage.look(ask())) == 2


def test_images_go_only_to_workers_that_say_they_take_them(stage: Stage) -> None:
    stage.join("old")
    stage.join("new", images=True)
    assert len(stage.look(ask())) == 2
    images = (PromptMedia(0, 1, b"digest", b"data"),)
    assert stage.look(ask(media=images)).targets == (RoutingTarget("new"),)
    assert len(stage.look(ask())) == 2


def test_workers_that_take_nothing_new_are_not_shown_until_they_do_again(stage: Stage) -> None:
    stage.join("a", "b", "c")
    stage.fleet.mark("a", interrupted=True)
    stage.fleet.mark("b", draining="stopping")
    assert stage.look(ask()).targets == (RoutingTarget("c"),)
    assert not stage.fleet.accepts("a")
    stage.fleet.mark("a", interrupted=False)
    stage.fleet.mark("b", draining="")
    assert len(stage.look(ask())) == 3


def test_columns_follow_their_workers_when_others_leave(stage: Stage) -> None:
    stage.join("a", "b", "c")
    stage.commit(ask("1"), "b")
    stage.commit(ask("2"), "c")
    stage.commit(ask("3"), "c")
    stage.fleet.remove("a")
    assert stage.column("waiting", "b") == 1
    assert stage.column("waiting", "c") == 2
    stage.join("a")
    assert stage.column("waiting", "a") == 0
    seen = stage.look(ask())
    assert len(set(seen.worker.tolist())) == 3


def test_work_is_accounted_from_the_decision_to_its_end(stage: Stage) -> None:
    stage.join("p", role=P)
    stage.join("d", role=D)
    charges = stage.commit(ask(), "d", "p", cached=8)
    queued = [stage.column(name, "p") for name in ("queued_prefill_tokens", "waiting", "streams")]
    assert queued == [13, 1, 0]
    assert [stage.column(name, "d") for name in ("waiting", "streams", "reserved_kv_tokens")] == [0, 1, 25]
    for target in (RoutingTarget("p"), RoutingTarget("d")):
        stage.fleet.settle(charges, target, replace(charges[target]))
    assert not charges
    assert not stage.fleet.accounted()
    assert stage.column("queued_prefill_tokens", "p") == stage.column("streams", "d") == 0


def test_once_the_prompt_is_computed_only_the_stream_is_left(stage: Stage) -> None:
    stage.join("b")
    charges = stage.commit(ask(), "b")
    stage.fleet.settle(charges, RoutingTarget("b"), charges[RoutingTarget("b")].prompt())
    assert [stage.column(name, "b") for name in ("queued_prefill_tokens", "waiting", "streams")] == [0, 0, 1]


def test_the_prompt_that_a_place_is_at_gets_shorter_with_time(stage: Stage) -> None:
    """At the prior of 20,000 tokens a second; the next prompt begins when this one is seen to be done."""
    stage.join("b")
    first, second = ask("1", tokens=1000), ask("2", tokens=600)
    charges = stage.commit(first, "b")
    stage.commit(second, "b")

    def queued(now: float) -> int:
        stage.fleet.plan(ask("3"), array("Q"), now)
        return int(stage.policy.seen[-1].queued_prefill_tokens[0])

    assert [queued(0.0), queued(0.01), queued(0.04), queued(9.0)] == [1600, 1400, 800, 600]
    stage.fleet.confirm("1", RoutingTarget("b"), 10.0)
    stage.fleet.settle(charges, RoutingTarget("b"), charges[RoutingTarget("b")].prompt())
    assert [queued(10.0), queued(10.01)] == pytest.approx([600, 400], abs=1)


def test_prompts_that_end_out_of_order_leave_the_first_at_work(stage: Stage) -> None:
    stage.join("b")
    stage.commit(ask("1", tokens=1000), "b")
    charges = stage.commit(ask("2", tokens=600), "b")
    stage.fleet.confirm("2", RoutingTarget("b"), 0.01)
    stage.fleet.settle(charges, RoutingTarget("b"), replace(charges[RoutingTarget("b")]))
    stage.fleet.plan(ask("3"), array("Q"), 0.01)
    assert stage.policy.seen[-1].queued_prefill_tokens.tolist() == [800]


def test_a_prefix_that_is_cached_is_not_reserved_again_for_each_request_that_shares_it(stage: Stage) -> None:
    stage.join("b")
    for number in range(3):
        stage.commit(ask(str(number), tokens=200), "b", cached=196)
    assert stage.column("reserved_kv_tokens", "b") == 3 * (4 + 4)


def test_what_was_sent_counts_as_cached_at_once_but_for_the_last_token(stage: Stage) -> None:
    stage.join("a", "b")
    stage.commit(ask(tokens=20), "a")
    assert stage.column("cached_tokens", "a") == 20
    assert stage.look(ask(tokens=20)).cached_tokens.tolist() == [16, 0]
    assert stage.column("held_tokens", "a") == 20


def test_what_will_not_be_computed_is_forgotten(stage: Stage) -> None:
    stage.join("a")
    stage.commit(ask(), "a")
    stage.fleet.abandon("r")
    assert stage.column("cached_tokens", "a") == 0
    assert stage.fleet.predicted == 0


def test_what_was_computed_stays_predicted_where_nothing_is_reported(stage: Stage) -> None:
    stage.join("a")
    stage.commit(ask(), "a")
    stage.fleet.confirm("r", RoutingTarget("a"), 1.0)
    stage.fleet.abandon("r")
    assert stage.column("cached_tokens", "a") == 20
    assert stage.fleet.predicted == 0


def test_predictions_of_a_second_attempt_replace_those_of_the_first(stage: Stage) -> None:
    stage.join("a", "b")
    stage.commit(ask(), "a")
    stage.commit(ask(), "b")
    assert [stage.column("cached_tokens", worker) for worker in "ab"] == [0, 20]


def test_avoided_workers_are_shown_only_when_the_others_do_not_suffice(stage: Stage) -> None:
    stage.join("a", "b")
    stage.look(ask(), avoid={"a"})
    assert [seen.targets for seen in stage.policy.seen] == [
        (RoutingTarget("b"),),
        (RoutingTarget("a"), RoutingTarget("b")),
    ]


def test_a_request_with_a_worker_avoids_those_that_could_stand_in_for_it(stage: Stage) -> None:
    stage.join("p0", "p1", role=P)
    stage.join("d0", "d1", role=D)
    for worker_id, shown in (("p1", {"p1", "d0", "d1"}), ("d0", {"p0", "p1", "d0"})):
        stage.policy.seen.clear()
        stage.look(ask(worker=worker_id))
        assert {target.worker_id for target in stage.policy.seen[0].targets} == shown
    assert {target.worker_id for target in stage.policy.seen[-1].targets} == {"p0", "p1", "d0", "d1"}
    stage.join("b", role=B)
    stage.policy.seen.clear()
    stage.look(ask(worker="b"))
    assert stage.policy.seen[0].targets == (RoutingTarget("b"),)


def test_where_the_prompt_is_computed_already_only_the_rest_is_decided(stage: Stage) -> None:
    stage.join("p0", "p1", role=P)
    stage.join("b", "d", role=B)
    stage.fleet.mark("p0", draining="stopping")
    seen = stage.look(ask(), prefilled_on=RoutingTarget("p0"), avoid={"d", "p0"})
    first = stage.policy.seen[0]
    assert first.targets == (RoutingTarget("p0"), RoutingTarget("b"))
    assert seen.targets == (RoutingTarget("p0"), RoutingTarget("b"), RoutingTarget("d"))
    assert seen.prefills.tolist() == [True, False, False]
    assert seen.cached_tokens.tolist() == [20, 0, 0]


def test_what_is_missing_is_asked_of_workers_that_are_ready(stage: Stage) -> None:
    stage.join("p", "q", role=P)
    stage.join("d", role=D)
    stage.fleet.mark("q", interrupted=True)
    assert stage.fleet.missing() == "[True, False] [False, True] [0, 1]"


# -- health ----------------------------------------------------------------------------------------


def eject(stage: Stage, *worker_ids: str, now: float = 0.0) -> None:
    for worker_id in worker_ids:
        for _ in range(HealthSpec().consecutive_failures):
            stage.fleet.health.failed(worker_id, "worker_failed", now)


def test_a_worker_that_keeps_failing_is_not_shown_while_others_serve(stage: Stage) -> None:
    stage.join("a", "b", "c")
    eject(stage, "a")
    stage.policy.answer = Plan(None, RoutingTarget("b"), "test")
    assert stage.look(ask()).targets == (RoutingTarget("b"), RoutingTarget("c"))
    assert stage.look(ask()).targets == (RoutingTarget("b"), RoutingTarget("c"))
    assert len(stage.policy.seen) == 2
    assert stage.look(ask(), avoid={"b"}).targets == (RoutingTarget("c"),)


def test_failing_workers_are_shown_last_of_all(stage: Stage) -> None:
    """Where the places without both sets do not do, one that failed this request comes before one that fails
    whatever it is sent."""
    stage.join("a", "b", "c", "d")
    eject(stage, "a")
    stage.look(ask(), avoid={"b"})
    assert [{target.worker_id for target in seen.targets} for seen in stage.policy.seen] == [
        {"c", "d"},
        {"b", "c", "d"},
        {"a", "b", "c", "d"},
    ]


def test_rows_keep_their_columns_where_others_are_left_out(stage: Stage) -> None:
    stage.join("leaving", "a", "b", "c")
    stage.fleet.mark("leaving", draining="stopping")
    stage.commit(ask("1"), "c")
    eject(stage, "a")
    stage.policy.answer = Plan(None, RoutingTarget("b"), "test")
    seen = stage.look(ask())
    assert seen.targets == (RoutingTarget("b"), RoutingTarget("c"))
    assert seen.waiting.tolist() == [0, 1]
    assert seen.cached_tokens.tolist() == [0, 20]
    assert seen.kv_tokens.tolist() == [400, 400]


def test_where_the_prompt_lies_is_used_however_its_worker_is(stage: Stage) -> None:
    stage.join("p0", "p1", role=P)
    stage.join("d0", "d1", role=D)
    eject(stage, "p0", "d0")
    stage.policy.answer = Plan(RoutingTarget("p0"), RoutingTarget("d1"), "test")
    assert stage.look(ask(), prefilled_on=RoutingTarget("p0")).targets == (
        RoutingTarget("p0"),
        RoutingTarget("d1"),
    )


def test_a_worker_that_joins_later_is_given_little_until_it_has_its_share(stage: Stage) -> None:
    stage.join("a", "b")
    stage.policy.answer = Plan(None, RoutingTarget("b"), "test")
    stage.fleet.add("new", stage.identity("new"), 100.0)

    def shown(now: float) -> set[str]:
        stage.fleet.plan(ask(), array("Q"), now)
        return {target.worker_id for target in stage.policy.seen[-1].targets}

    assert shown(100.0) == {"a", "b", "new"}
    charges = stage.commit(ask("1"), "new")
    stage.fleet.settle(charges, RoutingTarget("new"), replace(charges[RoutingTarget("new")]))
    assert shown(100.0) == {"a", "b"}
    for number in range(22):
        stage.commit(ask(f"more-{number}"), "ab"[number % 2])
    assert shown(100.0) == {"a", "b", "new"}
    stage.commit(ask("2"), "new")
    assert shown(100.0) == {"a", "b"}
    assert shown(100.0 + HealthSpec().slow_start_s) == {"a", "b", "new"}


def test_a_request_counts_at_each_of_its_workers_until_it_is_over_there(stage: Stage) -> None:
    stage.join("p", role=P)
    stage.join("d", role=D)
    workers = stage.fleet.workers
    charges = stage.commit(ask(), "d", "p")
    assert (workers["p"].charged, workers["d"].charged) == (1, 1)
    stage.fleet.settle(charges, RoutingTarget("p"), replace(charges[RoutingTarget("p")]))
    assert (workers["p"].charged, workers["d"].charged) == (0, 1)
    stage.fleet.remove("d")
    stage.join("d", role=D)
    assert stage.fleet.workers["d"].charged == 0


def test_a_worker_that_cannot_be_reached_is_silent_until_it_can(stage: Stage) -> None:
    stage.join("a", "b")
    stage.fleet.mark("a", interrupted=True, now=5.0)
    assert stage.fleet.health.view("a", 6.0).state == "unresponsive"
    stage.fleet.mark("a", draining="stopping", now=6.0)
    stage.fleet.mark("a", interrupted=False, now=7.0)
    assert stage.fleet.health.view("a", 7.0).state == "slow_start"


# -- reports ---------------------------------------------------------------------------------------


def test_a_report_adds_only_what_others_have_put_there(stage: Stage) -> None:
    stage.join("a")
    stage.commit(ask("1"), "a")
    stage.fleet.workers["a"].legs["1"] = "1"
    stage.fleet.report("a", EngineLoad(running=1, waiting=0))
    assert stage.column("streams", "a") == 1
    stage.fleet.report("a", EngineLoad(running=3, waiting=2))
    assert stage.column("streams", "a") == 5
    assert stage.column("waiting", "a") == 1 + 2


def test_others_are_supposed_to_send_what_we_send_until_the_next_report(stage: Stage) -> None:
    """Three quarters of what the workers report is not ours."""
    stage.join("a", "b")
    stage.commit(ask("1"), "a")
    stage.fleet.workers["a"].legs["1"] = "1"
    stage.fleet.report("a", EngineLoad(running=4))
    stage.commit(ask("2"), "b")
    assert stage.column("waiting", "b") == 4
    assert stage.column("queued_prefill_tokens", "b") == 4 * 21
    stage.fleet.workers["b"].legs["2"] = "2"
    stage.fleet.report("b", EngineLoad(running=1))
    assert stage.column("waiting", "b") == 1


def test_nothing_is_supposed_of_others_where_there_are_none(stage: Stage) -> None:
    stage.join("a", "b")
    for name in "1234":
        stage.commit(ask(name), "a")
    assert stage.column("waiting", "a") == 4


def test_what_was_supposed_of_others_ends_with_our_own(stage: Stage) -> None:
    stage.join("a", "b")
    stage.fleet.workers["a"].legs["0"] = "0"
    stage.fleet.report("a", EngineLoad(running=4))
    charges = stage.commit(ask("1"), "b")
    stage.fleet.settle(charges, RoutingTarget("b"), replace(charges[RoutingTarget("b")]))
    assert stage.column("waiting", "b") == stage.column("streams", "b") == 0


def test_strangers_on_a_prefill_worker_wait_to_be_computed(stage: Stage) -> None:
    stage.join("p", role=P)
    stage.join("d", role=D)
    stage.commit(ask("1", tokens=200), "d", "p")
    stage.fleet.workers["p"].legs["1"] = "1"
    stage.fleet.report("p", EngineLoad(running=2, waiting=1))
    assert stage.column("streams", "p") == 0
    assert stage.column("waiting", "p") == 1 + 2
    assert stage.column("queued_prefill_tokens", "p") > 200


def test_strangers_on_a_prefill_worker_may_be_streams_while_nobody_else_decodes(stage: Stage) -> None:
    stage.join("p", role=P)
    stage.fleet.gap.note(None)
    stage.fleet.gap.note("no worker that decodes")
    assert stage.fleet.open_gap(0.0)
    stage.fleet.report("p", EngineLoad(running=3, waiting=1))
    assert stage.column("streams", "p") == 4
    assert stage.column("waiting", "p") == 1


def test_memory_that_a_worker_reports_in_use_is_not_ours_to_promise(stage: Stage) -> None:
    stage.join("a")
    stage.fleet.report("a", EngineLoad(kv_usage=0.5))
    assert stage.column("reserved_kv_tokens", "a") == 200
    stage.commit(ask("1", tokens=20), "a")
    assert stage.column("reserved_kv_tokens", "a") == 200 + 20 + 4


def test_a_worker_that_is_gone_takes_its_report_along(stage: Stage) -> None:
    stage.join("a", "b")
    stage.fleet.workers["a"].legs["0"] = "0"
    stage.fleet.report("a", EngineLoad(running=9))
    stage.fleet.remove("a")
    stage.fleet.workers["b"].legs["1"] = "1"
    stage.fleet.report("b", EngineLoad(running=2))
    stage.commit(ask("2"), "b")
    # One stranger beside one of ours: our next one counts twice, on top of the stranger.
    assert stage.column("streams", "b") == 1 + 2


# -- rates -----------------------------------------------------------------------------------------


def test_measured_rates_reach_all_ranks_of_their_worker_and_pools_that_have_measured_nothing(
    stage: Stage,
) -> None:
    stage.join("a", ranks=2)
    stage.join("b", role=P, ranks=2)
    for _ in range(50):
        usage = Usage(prompt_tokens=1000, output_tokens=1)
        stage.fleet.measured(RoutingTarget("a", 1), usage, Timings(prefill_s=3.0))
    seen = stage.look(ask())
    took = seen.rates.prefill_fixed_s + 1000 * seen.rates.prefill_token_s
    assert took.tolist() == pytest.approx([3.0] * 4, rel=0.05)
    assert seen.rates.step_fixed_s.tolist() == [CostRates().step_fixed_s] * 4


def test_rates_are_learned_under_the_id_of_the_session_whatever_the_worker_calls_itself(
    stage: Stage, make_identity: MakeIdentity
) -> None:
    stage.fleet.add("pool/replica-1", make_identity("decode-7f"), 0.0)
    for _ in range(50):
        usage = Usage(prompt_tokens=1000, output_tokens=1)
        stage.fleet.measured(RoutingTarget("pool/replica-1"), usage, Timings(prefill_s=3.0))
    rates = stage.look(ask()).rates
    assert float((rates.prefill_fixed_s + 1000 * rates.prefill_token_s)[0]) == pytest.approx(3.0, rel=0.05)
    stage.fleet.remove("pool/replica-1")
    with pytest.raises(KeyError):
        stage.rates.rates("pool/replica-1")


def test_steps_that_shared_the_worker_with_prompts_are_not_taken_for_slow_ones(stage: Stage) -> None:
    """A stream decodes 100 steps of 5 ms while another prompt takes its share of the same seconds."""
    stage.join("a")
    prior = stage.look(ask()).rates
    prompt_s = 2000 * float(prior.prefill_token_s[0])
    for number in range(40):
        stream, prompt = ask(f"s{number}"), ask(f"p{number}", tokens=2000)
        streaming, computing = stage.commit(stream, "a"), stage.commit(prompt, "a")
        stage.fleet.settle(streaming, RoutingTarget("a"), streaming[RoutingTarget("a")].prompt())
        stage.fleet.settle(computing, RoutingTarget("a"), computing[RoutingTarget("a")].prompt())
        usage, timings = Usage(21, output_tokens=101), Timings(decode_s=100 * 0.005 + prompt_s)
        stage.fleet.measured(RoutingTarget("a"), usage, timings, streaming)
        for charges in (streaming, computing):
            stage.fleet.settle(charges, RoutingTarget("a"), replace(charges[RoutingTarget("a")]))
    rates = stage.look(ask()).rates
    assert float(rates.step_fixed_s[0] + 2 * rates.step_stream_s[0]) == pytest.approx(0.005, rel=0.05)


def test_a_worker_begins_at_the_roofline_of_its_hardware(stage: Stage, make_identity: MakeIdentity) -> None:
    fast = replace(
        make_identity("gpu"),
        hardware=Hardware("H200", 1, 9.9e14, 4.8e12),
        model_parameters=8 * 10**9,
        model_bytes=16 * 10**9,
    )
    stage.fleet.add("gpu", fast, 0.0)
    stage.join("cpu")
    rates = stage.look(ask()).rates
    assert float(rates.prefill_token_s[0]) < float(rates.prefill_token_s[1])
