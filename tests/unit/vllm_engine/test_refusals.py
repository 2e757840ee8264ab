"""Legs that the vLLM adapter refuses, with its messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvasir.core.requests import (
    Constraint,
    Continuation,
    EngineRequest,
    KvHandoff,
    Leg,
    OutputParsing,
    Sampling,
    StructuredOutput,
    token_ids,
)
from kvasir_workers.engines.vllm.setup.refusals import invalid

HANDOFF = KvHandoff("l", 1, 1.0, 1, b"")
GREEDY = Sampling(temperature=0.0, max_tokens=8)
CONTINUED = EngineRequest("r", token_ids([1, 2, 3, 4]), GREEDY, continuation=Continuation(2, 5))


def said(request: EngineRequest, *, disaggregated: bool = True, reasons: bool = True) -> str | None:
    return invalid(request, adapters={"a"}, disaggregated=disaggregated, reasons=reasons)


@pytest.mark.parametrize(
    "request_",
    [
        CONTINUED,
        replace(CONTINUED, leg=Leg.DECODE, handoff=HANDOFF),
        replace(CONTINUED, adapter="a"),
        replace(CONTINUED, sampling=Sampling(temperature=1.0)),
        replace(CONTINUED, sampling=Sampling(temperature=0.0, seed=3, repetition_penalty=1.2)),
        EngineRequest("r", token_ids([1]), Sampling(seed=3, presence_penalty=0.5, n=2)),
        EngineRequest("r", token_ids([1]), Sampling(n=2), leg=Leg.PREFILL),
    ],
)
def test_what_can_run_is_not_refused(request_: EngineRequest) -> None:
    assert said(request_) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seed": 3, "temperature": 0.5}, "seeded draws cannot be continued"),
        ({"presence_penalty": 0.5}, "penalties cannot be continued"),
        ({"frequency_penalty": -0.5}, "penalties cannot be continued"),
        ({"max_tokens": 2}, "nothing is left to generate"),
        ({"max_tokens": 1}, "nothing is left to generate"),
        ({"n": 2}, "one choice"),
        ({"bad_words": ("rain",)}, "bad_words cannot be continued"),
        ({"thinking_tokens": 5}, "reasoning cannot be continued"),
    ],
)
def test_what_could_not_go_on_exactly_is_refused(change: dict[str, Any], reason: str) -> None:
    assert reason in str(said(replace(CONTINUED, sampling=replace(GREEDY, **change))))


@pytest.mark.parametrize("continuation", [Continuation(0, 0), Continuation(4, 5), Continuation(2, -1)])
def test_a_continuation_is_a_part_of_its_tokens(continuation: Continuation) -> None:
    assert "comes after a prompt" in str(said(replace(CONTINUED, continuation=continuation)))


def test_what_a_worker_cannot_answer_is_refused() -> None:
    bounded = EngineRequest("r", token_ids([1]), Sampling(thinking_tokens=5))
    assert said(bounded) is None
    assert "needs engine.reasoning_parser" in str(said(bounded, reasons=False))
    assert said(replace(bounded, leg=Leg.PREFILL), reasons=False) is None
    told = EngineRequest("r", token_ids([1]), Sampling(prompt_logprobs=1))
    assert said(told) is None
    assert "send a full leg" in str(said(replace(told, leg=Leg.DECODE, handoff=HANDOFF)))
    ruled = Sampling(structured=StructuredOutput(Constraint.REGEX, "a"))
    assert said(replace(CONTINUED, sampling=ruled, parsing=OutputParsing())) is None


def test_legs_must_fit_the_worker() -> None:
    prefill = EngineRequest("r", token_ids([1]), GREEDY, leg=Leg.PREFILL)
    decode = replace(prefill, leg=Leg.DECODE)
    assert "role embed" in str(said(replace(prefill, leg=Leg.EMBED)))
    assert "moves no KV" in str(said(prefill, disaggregated=False))
    assert "needs the hand-off" in str(said(decode))
    assert "n > 1" in str(said(replace(decode, handoff=HANDOFF, sampling=Sampling(n=2))))
    assert "not loaded" in str(said(replace(prefill, adapter="b")))
    assert "no output to continue" in str(said(replace(CONTINUED, leg=Leg.PREFILL)))
