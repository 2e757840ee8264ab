"""Conversion of one request's vLLM outputs to deltas, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvasir.core.requests import (
    Continuation,
    Delta,
    EngineRequest,
    FinishReason,
    KvHandoff,
    Leg,
    Sampling,
    ToolCallDelta,
    token_ids,
)
from kvasir_workers.engines.parts import StepParts
from kvasir_workers.engines.vllm.output.stream import LegStream, handoff_of, pull_of


@dataclass
class Metrics:
    queued_ts: float = 10.0
    scheduled_ts: float = 10.5
    first_token_ts: float = 11.5
    last_token_ts: float = 14.5


@dataclass
class Candidate:
    logprob: float
    rank: int
    decoded_token: str


@dataclass
class Completion:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    index: int = 0
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Output:
    outputs: list[Any]
    finished: bool = False
    num_cached_tokens: int | None = 0
    kv_transfer_params: dict[str, Any] | None = None
    metrics: Any = field(default_factory=Metrics)
    prompt_logprobs: Any = None


class Shouting:
    """Takes text apart: capitals are reasoning, which it holds back until the end."""

    def __init__(self) -> None:
        self.held = ""
        self.thought = 0
        self.finished = False

    def take(self, text: str, token_ids: Sequence[int], *, finished: bool) -> StepParts:
        self.finished = finished
        self.thought += len(token_ids) if text.isupper() else 0
        self.held += text if text.isupper() else ""
        reasoning, self.held = (self.held, "") if finished else ("", self.held)
        calls = (ToolCallDelta(0, "c", "f", "{}"),) if text == "call" else ()
        content = "" if text.isupper() or calls else text
        return StepParts(content, reasoning, calls, taken=len(text))

    def reasoning_tokens(self) -> int:
        return self.thought


def stream(
    leg: Leg = Leg.FULL, prompt: int = 100, *, fails_without_kv: bool = False, **sampling: Any
) -> LegStream:
    request = EngineRequest("r", token_ids(range(prompt)), Sampling(**sampling), leg=leg)
    return LegStream(request, fails_without_kv=fails_without_kv)


def test_the_offsets_of_a_continuation_follow_what_the_client_has() -> None:
    request = EngineRequest(
        "r", token_ids(range(10)), Sampling(max_tokens=9), continuation=Continuation(4, 20)
    )
    one = LegStream(request)
    (first,) = one.deltas(Output([Completion([1, 2], "ab")]))
    (end,) = one.deltas(Output([Completion([3], "c", finish_reason="length")], finished=True))
    assert (first.offset, end.offset) == (4, 6)
    assert end.usage is not None
    assert (end.usage.prompt_tokens, end.usage.output_tokens) == (10, 3)
    assert LegStream(request).abort().offset == LegStream(request).fail("no_capacity", "full").offset == 4


def test_offsets_are_contiguous_per_choice() -> None:
    one = stream(n=2)
    steps = [
        Output([Completion([1, 2], "ab", index=0)]),
        Output([Completion([9], "z", index=1)]),
        Output([Completion([3], "c", index=0, finish_reason="length")]),
        Output([Completion([8], "y", index=1, finish_reason="length")], finished=True),
    ]
    deltas = [delta for step in steps for delta in one.deltas(step)]
    assert [(d.index, d.offset) for d in deltas] == [(0, 0), (1, 0), (0, 2), (1, 1)]
    assert [d.last for d in deltas] == [False, False, False, True]
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.output_tokens == 5


@pytest.mark.parametrize("parsed", [False, True])
def test_the_first_delta_of_a_whole_leg_tells_what_was_cached(parsed: bool) -> None:
    def usages(leg: Leg, cached: int) -> list[int | None]:
        one = stream(leg, n=2)
        one.parsers = [Shouting(), Shouting()] if parsed else ()
        steps = [
            Output([Completion(index=0)], num_cached_tokens=cached),
            Output([Completion([1], "a", index=0), Completion([9], "z", index=1)], num_cached_tokens=cached),
            Output([Completion([2], "b", index=0)], num_cached_tokens=cached),
        ]
        deltas = [delta for step in steps for delta in one.deltas(step)]
        return [None if delta.usage is None else delta.usage.cached_tokens for delta in deltas]

    assert usages(Leg.FULL, 64) == [64, None, None]
    assert usages(Leg.FULL, 0) == usages(Leg.DECODE, 64) == [None, None, None]


def test_each_choice_is_taken_apart_by_its_own_parser() -> None:
    one = stream(n=2)
    one.parsers = [Shouting(), Shouting()]
    steps = [
        Output([Completion([1], "AH", index=0), Completion([5], "call", index=1)]),
        Output([Completion([2], "so", index=0, finish_reason="stop")]),
        Output([Completion([6], "EH", index=1, finish_reason="length")], finished=True),
    ]
    first, called, said, end = [delta for step in steps for delta in one.deltas(step)]
    assert (first.text, first.reasoning, first.raw_length, first.token_ids) == ("", "", 2, (1,))
    assert called.tool_calls == (ToolCallDelta(0, "c", "f", "{}"),)
    assert (said.text, said.reasoning, said.reasoning_tokens, said.raw_length) == ("so", "AH", 1, 2)
    assert (end.reasoning, end.reasoning_tokens, end.last) == ("EH", 1, True)


def test_text_that_nobody_takes_apart_says_so() -> None:
    (delta,) = stream().deltas(Output([Completion([1], "ab")]))
    assert (delta.text, delta.raw_length, delta.reasoning, delta.tool_calls) == ("ab", None, "", ())


def test_the_prompts_logprobs_are_told_once() -> None:
    def position(token: int) -> dict[int, Candidate]:
        return {token: Candidate(-3.0, 9, "t"), 90: Candidate(-0.5, 1, "a"), 91: Candidate(-1.0, 2, "b")}

    one = stream(prompt=3, n=2, prompt_logprobs=1)
    told = [None, position(1), position(2)]
    first, second = (
        one.deltas(Output([Completion([7], index=index)], prompt_logprobs=told))[0] for index in (0, 1)
    )
    assert first.prompt_logprobs[0] is None
    assert [each.sampled.token_id for each in first.prompt_logprobs if each] == [1, 2]
    assert [[top.token_id for top in each.top] for each in first.prompt_logprobs if each] == [[90], [90]]
    assert second.prompt_logprobs == ()


def test_nothing_follows_the_last_delta() -> None:
    one = stream()
    assert one.deltas(Output([Completion([1], finish_reason="stop")], finished=True))[0].last
    assert one.ended
    assert one.deltas(Output([Completion([2])])) == []


def test_a_step_without_tokens_makes_no_delta() -> None:
    assert stream().deltas(Output([Completion()])) == []


def test_a_stop_token_is_named_as_text() -> None:
    (delta,) = stream().deltas(Output([Completion([7], finish_reason="stop", stop_reason=7)], finished=True))
    assert (delta.finish, delta.stop_reason) == (FinishReason.STOP, "7")


def test_timings_are_the_distances_between_the_engines_stamps() -> None:
    (delta,) = stream().deltas(Output([Completion([1], finish_reason="stop")], finished=True))
    assert delta.timings is not None
    assert (delta.timings.queue_s, delta.timings.prefill_s, delta.timings.decode_s) == (0.5, 1.0, 3.0)


def test_a_stage_that_was_not_reached_took_no_time() -> None:
    unscheduled = Metrics(queued_ts=10.0, scheduled_ts=0.0, first_token_ts=0.0, last_token_ts=0.0)
    output = Output([Completion(finish_reason="abort")], finished=True, metrics=unscheduled)
    (delta,) = stream().deltas(output)
    assert delta.timings is not None
    assert delta.timings.queue_s == delta.timings.prefill_s == delta.timings.decode_s == 0.0


def test_a_prefill_leg_gives_a_handoff_and_no_token() -> None:
    moved = {"lease_id": "l", "fence": 3, "ttl_s": 2.5, "blocks": 4, "ticket": "t"}
    output = Output([Completion([5], "x", finish_reason="length")], finished=True, kv_transfer_params=moved)
    (delta,) = stream(Leg.PREFILL).deltas(output)
    assert (delta.token_ids, delta.text) == ((), "")
    assert delta.handoff == KvHandoff("l", 3, 2.5, 4, b"t")
    assert pull_of(delta.handoff) == moved


OFFERED = {"lease_id": "r#1", "fence": 3, "ttl_s": 2.5, "blocks": 4, "ticket": "t"}


def test_a_prefill_leg_that_still_computes_passes_its_offer_on() -> None:
    leg = stream(Leg.PREFILL)
    leg.lease_id = "r#1"
    delta = leg.offered(OFFERED)
    assert delta == Delta("r", 0, handoff=KvHandoff("r#1", 3, 2.5, 4, b"t"))
    assert not leg.ended


def test_an_offer_of_another_legs_kv_is_not_passed_on() -> None:
    leg = stream(Leg.PREFILL)
    assert leg.offered(OFFERED) is None
    leg.lease_id = "r#2"
    assert leg.offered(OFFERED) is None
    leg.lease_id = "r#1"
    leg.abort()
    assert leg.offered(OFFERED) is None


def test_a_prefill_leg_without_an_offer_is_a_failure() -> None:
    (delta,) = stream(Leg.PREFILL).deltas(Output([Completion([5], finish_reason="length")], finished=True))
    assert (delta.finish, delta.error) == (FinishReason.ERROR, "transfer_failed")
    assert handoff_of({}) is None


@pytest.mark.parametrize(("cached", "transferred", "expected"), [(99, 99, 0), (99, 35, 64), (64, 0, 64)])
def test_what_was_moved_is_not_counted_as_a_prefix_hit(cached: int, transferred: int, expected: int) -> None:
    moved = {"transferred_tokens": transferred, "transferred_bytes": 8, "transfer_s": 0.25}
    output = Output(
        [Completion([1], finish_reason="stop")],
        finished=True,
        num_cached_tokens=cached,
        kv_transfer_params=moved,
    )
    (delta,) = stream(Leg.DECODE).deltas(output)
    assert delta.usage is not None
    assert delta.timings is not None
    assert (delta.usage.cached_tokens, delta.usage.transferred_tokens) == (expected, transferred)
    assert delta.usage.transferred_bytes == 8
    assert (delta.timings.transfer_s, delta.timings.queue_s) == (0.25, 0.25)


def test_what_came_from_a_tier_is_a_prefix_hit_and_no_queueing() -> None:
    output = Output(
        [Completion([1], finish_reason="stop")],
        finished=True,
        num_cached_tokens=96,
        kv_transfer_params={"tier_tokens": 64, "tier_s": 0.25},
    )
    (delta,) = stream(Leg.FULL).deltas(output)
    assert delta.usage is not None
    assert delta.timings is not None
    assert (delta.usage.cached_tokens, delta.usage.tier_tokens) == (96, 64)
    assert (delta.timings.tier_s, delta.timings.queue_s) == (0.25, 0.25)


@pytest.mark.parametrize(
    ("leg", "fails_without_kv", "tokens", "code"),
    [
        (Leg.DECODE, True, [], "transfer_failed"),
        (Leg.DECODE, True, [5], "worker_failed"),
        (Leg.DECODE, False, [], "worker_failed"),
        (Leg.FULL, True, [], "worker_failed"),
    ],
)
def test_an_engine_error_has_a_stable_code(
    leg: Leg, fails_without_kv: bool, tokens: list[int], code: str
) -> None:
    output = Output([Completion(tokens, finish_reason="error")], finished=True)
    (delta,) = stream(leg, fails_without_kv=fails_without_kv).deltas(output)
    assert (delta.finish, delta.error) == (FinishReason.ERROR, code)


def test_logprobs_keep_the_sampled_token_apart_from_the_best() -> None:
    positions = [{5: Candidate(-3.0, 9, "e"), 1: Candidate(-0.5, 1, "a"), 2: Candidate(-1.0, 2, "b")}]
    (delta,) = stream(logprobs=2).deltas(Output([Completion([5], "e", logprobs=positions)]))
    (position,) = delta.logprobs
    assert (position.sampled.token_id, position.sampled.logprob) == (5, -3.0)
    assert [candidate.token for candidate in position.top] == ["a", "b"]


def test_a_grammar_over_its_budget_is_an_error_of_the_request() -> None:
    stream = LegStream(EngineRequest("r", token_ids([1, 2]), Sampling(max_tokens=8)))
    ended = Completion(token_ids=[3], finish_reason="error", stop_reason="grammar_too_costly")
    (delta,) = stream.deltas(Output([ended], finished=True))
    assert (delta.finish, delta.error, delta.stop_reason) == (FinishReason.ERROR, "grammar_too_costly", None)
