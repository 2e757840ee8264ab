"""A client's sampled trace through gateway, router and real vLLM workers, as an OTLP collector receives it:
each process sends the spans of its own work."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import openai
import pytest
from tests.kit.gateway.otlp_collector import Collector, ReceivedSpan

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = pytest.mark.slow

CALLER = "00f067aa0ba902b7"
SENT_S = 20.0
"""Four times as long as an exporter collects spans before it sends them."""
UNSAMPLED, WHOLE, LONG_PROMPT, LONG_OUTPUT = "not sampled", "on one worker", "a long prompt", "a long output"
TOKENS = {UNSAMPLED: (100, 4), WHOLE: (100, 4), LONG_PROMPT: (1500, 4), LONG_OUTPUT: (100, 96)}
"""Of the prompt and of the output, in the order in which the calls are made. Each process sends its spans in
the order in which they end, so that those of the first call would be received before the others."""
TRACES = {name: f"{number:032x}" for number, name in enumerate(TOKENS, 1)}
APART = {
    "leg.prefill": {"engine.queue", "engine.prefill"},
    "leg.decode": {"engine.queue", "engine.pull", "engine.prefill", "engine.decode"},
}
LEGS: dict[str, dict[str, set[str]]] = {
    WHOLE: {"leg.full": {"engine.queue", "engine.prefill", "engine.decode"}},
    LONG_PROMPT: APART,
    LONG_OUTPUT: APART,
}
"""The legs of each sampled call, with the stages that an engine times in them."""


@dataclass(frozen=True, slots=True)
class TracedCall:
    """What the client saw of a call, and the spans of its trace. `traceparent` is that of the answer, and
    `lasted_s` how long the client waited for it."""

    traceparent: str
    usage: Any
    lasted_s: float
    spans: list[ReceivedSpan]

    def one(self, name: str) -> ReceivedSpan:
        """The only span of this name."""
        (found,) = [each for each in self.spans if each.span.name == name]
        return found

    def below(self, parent: str) -> dict[str, ReceivedSpan]:
        """The spans whose parent has this id, by name."""
        return {each.span.name: each for each in self.spans if each.span.parent_span_id.hex() == parent}

    def stages(self, leg: str) -> dict[str, ReceivedSpan]:
        """What an engine timed in a leg."""
        return self.below(self.one(leg).span.span_id.hex())


@pytest.fixture(scope="module")
def calls(stack: Stack, traces: Collector) -> dict[str, TracedCall]:
    """Calls that the same two workers have answered one after another. No two prompts begin alike, so that
    all of each is computed."""
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        rng = random.Random(11)
        answers = {name: answered(client, rng, name) for name in TOKENS}

    def sent() -> bool:
        names = {name: {each.span.name for each in traces.received_in(TRACES[name])} for name in LEGS}
        return all({"request", *legs} <= names[name] for name, legs in LEGS.items())

    stack.wait_until(sent, SENT_S, "the spans of gateway and workers")
    return {name: TracedCall(*answer, traces.received_in(TRACES[name])) for name, answer in answers.items()}


def answered(client: openai.OpenAI, rng: random.Random, name: str) -> tuple[str, Any, float]:
    """The traceparent of the answer to a call, its usage, and how long the client waited."""
    prompt_tokens, output_tokens = TOKENS[name]
    prompt = [rng.randrange(10, 4000) for _ in range(prompt_tokens)]
    sampled = "00" if name == UNSAMPLED else "01"
    began = time.monotonic()
    answer = client.completions.with_raw_response.create(
        model="kvasir-tiny",
        prompt=prompt,
        max_tokens=output_tokens,
        temperature=0,
        # The worker that computes the prompt has its logprobs, so no KV is handed over.
        extra_body={"ignore_eos": True} | ({"prompt_logprobs": 0} if name == WHOLE else {}),
        extra_headers={"traceparent": f"00-{TRACES[name]}-{CALLER}-{sampled}"},
    )
    lasted_s = time.monotonic() - began
    return answer.headers["traceparent"], answer.parse().usage, lasted_s


def lasted(received: ReceivedSpan) -> float:
    """Seconds."""
    return float(received.span.end_time_unix_nano - received.span.start_time_unix_nano) / 1e9


def attribute(received: ReceivedSpan, name: str) -> Any:
    (value,) = [each.value for each in received.span.attributes if each.key == name]
    return getattr(value, value.WhichOneof("value"))


@pytest.mark.parametrize("name", LEGS)
def test_a_call_is_a_span_of_the_clients_trace_and_its_legs_are_spans_of_the_call(
    calls: Mapping[str, TracedCall], name: str
) -> None:
    call, legs = calls[name], LEGS[name]
    own = call.one("request").span.span_id.hex()
    assert call.traceparent == f"00-{TRACES[name]}-{own}-01"
    assert call.below(CALLER).keys() == {"request"}
    gateway = {"admit", "queue", "route", "prefill", "decode"} | (set() if name == WHOLE else {"transfer"})
    assert call.below(own).keys() == gateway | legs.keys()
    assert {leg: call.stages(leg).keys() for leg in legs} == legs
    assert len(call.spans) == 1 + len(gateway) + sum(1 + len(stages) for stages in legs.values())


@pytest.mark.parametrize("name", LEGS)
def test_a_leg_is_sent_by_its_worker_which_the_router_chose(
    stack: Stack, calls: Mapping[str, TracedCall], name: str
) -> None:
    call = calls[name]
    workers = {worker["worker_id"] for worker in stack.workers()}
    chosen = {
        "leg.prefill": attribute(call.one("route"), "kvasir.prefill_worker"),
        "leg.decode": attribute(call.one("route"), "kvasir.decode_worker"),
    }
    chosen["leg.full"] = chosen["leg.decode"]
    for leg in LEGS[name]:
        for each in (call.one(leg), *call.stages(leg).values()):
            assert each.resource["service.name"] == "kvasir"
            assert each.resource["service.instance.id"] == chosen[leg]
        assert chosen[leg] in workers
        assert attribute(call.one(leg), "kvasir.prompt_tokens") == TOKENS[name][0]
        assert attribute(call.one(leg), "kvasir.outcome") == "length"
    *_, last = LEGS[name]
    assert attribute(call.one(last), "kvasir.output_tokens") == call.usage.completion_tokens
    gateway = call.one("request").resource
    assert gateway["service.name"] == "kvasir"
    assert gateway.get("service.instance.id") not in workers


@pytest.mark.parametrize("name", LEGS)
def test_the_stages_of_an_engine_take_time_which_the_client_waited(
    calls: Mapping[str, TracedCall], name: str
) -> None:
    call = calls[name]
    for leg in LEGS[name]:
        stages = {stage: lasted(received) for stage, received in call.stages(leg).items()}
        # A decode leg may wait for nothing but its KV.
        waits = stages.pop("engine.queue") if leg == "leg.decode" else 0.0
        assert min(stages.values()) > 0, stages
        assert waits + sum(stages.values()) < call.lasted_s, stages


def test_stages_last_longer_for_more_tokens(calls: Mapping[str, TracedCall]) -> None:
    prompt, output = calls[LONG_PROMPT], calls[LONG_OUTPUT]
    prefill = [lasted(call.stages("leg.prefill")["engine.prefill"]) for call in (prompt, output)]
    assert prefill[0] > prefill[1]
    decode = [lasted(call.stages("leg.decode")["engine.decode"]) for call in (prompt, output)]
    assert decode[1] > decode[0]


@pytest.mark.parametrize("name", [LONG_PROMPT, LONG_OUTPUT])
def test_gateway_and_decode_worker_agree_on_the_transfer(calls: Mapping[str, TracedCall], name: str) -> None:
    pulled, moved = calls[name].stages("leg.decode")["engine.pull"], calls[name].one("transfer")
    assert attribute(pulled, "kvasir.bytes") == attribute(moved, "kvasir.bytes") > 0
    assert lasted(pulled) == pytest.approx(lasted(moved), abs=1e-5)


def test_a_trace_that_its_client_does_not_sample_is_sent_by_nobody(calls: Mapping[str, TracedCall]) -> None:
    call = calls[UNSAMPLED]
    assert call.traceparent.startswith(f"00-{TRACES[UNSAMPLED]}-")
    assert call.traceparent.endswith("-00")
    assert call.spans == []
