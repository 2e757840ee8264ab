"""A stream of the simulated engine, cut anywhere and continued on another engine, equals the uncut stream."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.requests import (
    Continuation,
    Delta,
    EngineRequest,
    FinishReason,
    Leg,
    PositionLogprobs,
    Sampling,
    Usage,
    token_ids,
)
from kvasir_workers.engines.sim.model import SimModel
from kvasir_workers.engines.sim.scheduler import Scheduler
from kvasir_workers.engines.sim.state import SimLimits

# Few tokens, so that stop strings, stop tokens and the end of the sequence come up often.
MODEL = SimModel(vocab_size=12, eos_token_id=1)
CONTEXT = 40
PIECES = [MODEL.text(token) for token in range(MODEL.vocab_size)]

prompts = st.lists(st.integers(0, 11), min_size=1, max_size=12)
# Pieces of the texts of one or more tokens, so that a stop string may lie across them.
stops = st.builds(
    lambda words, begin, end: "".join(words)[begin : begin + end],
    st.lists(st.sampled_from(PIECES), min_size=2, max_size=3),
    st.integers(0, 3),
    st.integers(1, 7),
).filter(bool)
samplings = st.builds(
    Sampling,
    max_tokens=st.none() | st.integers(1, 30),
    min_tokens=st.integers(0, 20),
    temperature=st.sampled_from([0.0, 0.7]),
    seed=st.none() | st.integers(0, 3),
    stop=st.lists(stops, max_size=2).map(tuple),
    stop_token_ids=st.lists(st.integers(2, 11), max_size=2).map(tuple),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    skip_special_tokens=st.booleans(),
    logprobs=st.none() | st.integers(0, 3),
)


@dataclass
class Client:
    """What reached the client: all of it, and how much after each delta."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    end: tuple[FinishReason | None, str | None] = (None, None)
    usage: Usage | None = None
    after: list[tuple[int, int]] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def take(self, delta: Delta) -> None:
        assert delta.offset == len(self.tokens)
        self.tokens += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.pieces.append(delta.text)
        self.after.append((len(self.tokens), len(self.text)))
        self.end = (delta.finish, delta.stop_reason)
        self.usage = delta.usage


def scheduler() -> Scheduler:
    limits = SimLimits(
        block_size=4,
        blocks=16,
        bytes_per_block=10,
        max_model_len=CONTEXT,
        max_seqs=4,
        step_tokens=8,
        chunked_prefill=True,
        prefix_caching=True,
        lease_s=100.0,
        recompute_on_failure=True,
        max_live=8,
    )
    return Scheduler(limits, MODEL, worker_id="w", epoch=1)


def run(request: EngineRequest, client: Client) -> Client:
    """`request` on an engine of its own, heard by `client`."""
    engine = scheduler()
    engine.submit(request, 0.0)
    for _ in range(4 * CONTEXT):
        engine.schedule(0.0)
        engine.complete(0.0)
        engine.check_integrity()
        for delta in engine.take_deltas():
            client.take(delta)
            if delta.last:
                return client
    raise AssertionError("the request does not end")


def continued(whole: Client, prompt: list[int], sampling: Sampling, cut: int) -> Client:
    """What a client has, who heard `cut` deltas of `whole`, once another engine has gone on."""
    tokens, characters = whole.after[cut - 1]
    client = Client(whole.tokens[:tokens], whole.text[:characters], whole.logprobs[:tokens])
    request = EngineRequest(
        "r",
        token_ids([*prompt, *client.tokens]),
        sampling,
        continuation=Continuation(tokens, characters),
    )
    return run(request, client)


@given(prompt=prompts, sampling=samplings)
def test_a_stream_that_goes_on_elsewhere_is_the_uncut_stream(prompt: list[int], sampling: Sampling) -> None:
    whole = run(EngineRequest("r", token_ids(prompt), sampling), Client())
    for cut in range(1, len(whole.after)):
        got = continued(whole, prompt, sampling, cut)
        assert (got.tokens, got.text, got.logprobs) == (whole.tokens, whole.text, whole.logprobs)
        assert got.end == whole.end
        # Delta for delta: what is held back is the same as if nothing had happened.
        assert got.pieces == whole.pieces[cut:]
        had = whole.after[cut - 1][0]
        assert got.usage is not None
        assert got.usage.prompt_tokens == len(prompt) + had
        assert got.usage.output_tokens == len(whole.tokens) - had


def test_text_that_was_held_back_comes_out_after_the_cut() -> None:
    prompt = [3, 4, 5]
    free = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
    text = run(EngineRequest("r", token_ids(prompt), free), Client()).text
    # The whole text of several tokens but for its end: it is held back and then turns out to be none.
    sampling = replace(free, stop=(text[3:14] + "!",))
    whole = run(EngineRequest("r", token_ids(prompt), sampling), Client())
    assert whole.text == text
    cut = next(at for at in range(1, 20) if whole.after[at - 1][1] == 0)
    assert continued(whole, prompt, sampling, cut).text == text


def refusal(request: EngineRequest) -> Delta:
    engine = scheduler()
    engine.submit(request, 0.0)
    (delta,) = engine.take_deltas()
    assert (delta.finish, delta.last) == (FinishReason.ERROR, True)
    assert delta.error_message
    return delta


def test_a_continuation_with_nothing_left_to_generate_is_refused() -> None:
    request = EngineRequest(
        "r", token_ids([2, 3, 4, 5]), Sampling(max_tokens=2), continuation=Continuation(2, 6)
    )
    delta = refusal(request)
    assert (delta.error, delta.offset) == ("invalid_request", 2)
    assert "max_tokens is 2" in str(delta.error_message)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"continuation": Continuation(4, 0)}, "comes after a prompt"),
        ({"continuation": Continuation(0, 0)}, "is not empty"),
        ({"continuation": Continuation(2, 7)}, "the tokens of the continuation only 6"),
        ({"sampling": Sampling(n=2)}, "one choice"),
        ({"leg": Leg.PREFILL}, "no output to continue"),
    ],
)
def test_a_continuation_that_contradicts_its_request_is_refused(change: dict[str, object], said: str) -> None:
    request = EngineRequest("r", token_ids([2, 3, 4, 5]), Sampling(), continuation=Continuation(2, 6))
    delta = refusal(replace(request, **change))  # type: ignore[arg-type]
    assert delta.error == "invalid_request"
    assert said in str(delta.error_message)
