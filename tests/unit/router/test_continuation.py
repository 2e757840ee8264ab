"""Which way a stream goes on, and what a replay lets through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.requests import Delta, FinishReason, Request, Sampling, token_ids
from kvasir_router.continuation import Output, Replay, Way, extended, way_on


@pytest.mark.parametrize(
    ("sampling", "way"),
    [
        (Sampling(temperature=0.0), Way.EXTEND),
        (Sampling(temperature=1.0), Way.EXTEND),
        (Sampling(temperature=0.0, seed=1, repetition_penalty=1.3, stop=("x",), logprobs=2), Way.EXTEND),
        (Sampling(temperature=1.0, seed=1), Way.REPLAY),
        (Sampling(temperature=0.0, presence_penalty=0.5), Way.REPLAY),
        (Sampling(temperature=0.0, frequency_penalty=0.5), Way.REPLAY),
        (Sampling(temperature=0.0, n=2), Way.REPLAY),
        (Sampling(temperature=1.0, seed=1, n=2), Way.REPLAY),
        (Sampling(temperature=1.0, n=2), Way.NEITHER),
        (Sampling(temperature=1.0, presence_penalty=0.5), Way.NEITHER),
    ],
)
def test_the_way_on_is_the_cheapest_that_is_exact(sampling: Sampling, way: Way) -> None:
    assert way_on(sampling) is way


def test_an_extended_request_ends_with_what_the_client_has_and_forgets_the_prompts_block_names() -> None:
    request = Request("r", "m", token_ids([1, 2]), block_hashes=token_ids([9]))
    current, continuation = extended(request, Output(token_ids([5, 6]), text_length=3))
    assert list(current.tokens) == [1, 2, 5, 6]
    assert not len(current.block_hashes)
    assert (continuation.output_tokens, continuation.text_length) == (2, 3)


def had(tokens: list[int], text: str, *, finished: bool = False) -> Output:
    return Output(token_ids(tokens), len(text), finished)


@given(st.data())
def test_a_replay_that_repeats_itself_passes_exactly_what_the_client_lacks(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 12))
    known = data.draw(st.integers(0, total))
    # The text that the client has may lag behind its tokens, as text is held back for stop strings.
    read = data.draw(st.integers(0, known))
    output = had(list(range(known)), "x" * read)
    replay = Replay([output])
    at = written = 0
    while at < total:
        step = data.draw(st.integers(1, total - at))
        ends = at + step == total
        lag = 0 if ends else data.draw(st.integers(0, at + step - written))
        text = "x" * (at + step - written - lag)
        delta = Delta(
            "r", at, tuple(range(at, at + step)), text, finish=FinishReason.STOP if ends else None, last=ends
        )
        assert replay.fault(delta) is None
        rest = replay.rest(delta)
        assert rest.offset == len(output.tokens)
        assert rest.token_ids == tuple(range(max(known, at), at + step))
        output.add(rest)
        at, written = at + step, written + len(text)
    assert list(output.tokens) == list(range(total))
    assert output.text_length == total
    assert output.finished
    assert replay.open_choices == 0


@pytest.mark.parametrize(
    ("delta", "fault"),
    [
        (Delta("r", 0, (1, 3)), "did not repeat"),
        (Delta("r", 0, (1,), finish=FinishReason.STOP), "ends at token 1, of 2"),
    ],
)
def test_a_replay_that_differs_is_found_out(delta: Delta, fault: str) -> None:
    found = Replay([had([1, 2], "ab")]).fault(delta)
    assert found is not None
    assert fault in found


def test_a_choice_that_had_ended_ends_in_silence_and_must_end_at_the_same_place() -> None:
    outputs = [had([1, 2], "ab", finished=True), had([4], "d")]
    replay = Replay(outputs)
    rest = replay.rest(Delta("r", 0, (1, 2), "ab", finish=FinishReason.STOP))
    assert (rest.token_ids, rest.text, rest.finish) == ((), "", None)
    assert replay.open_choices == 1
    beyond = Replay(outputs).fault(Delta("r", 0, (1, 2, 3)))
    assert beyond is not None
    assert "had ended" in beyond
