"""How a stream is continued, and which tokens a replay passes on."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.requests import (
    Constraint,
    Delta,
    FinishReason,
    Request,
    Sampling,
    StructuredOutput,
    ToolCallDelta,
    token_ids,
)
from kvasir_router.requests.continuation import ChoiceOutput, ContinuationMode, ReplayFilter, extended, way_on


@pytest.mark.parametrize(
    ("sampling", "way"),
    [
        (Sampling(temperature=0.0), ContinuationMode.EXTEND),
        (Sampling(temperature=1.0), ContinuationMode.EXTEND),
        (
            Sampling(temperature=0.0, seed=1, repetition_penalty=1.3, stop=("x",), logprobs=2),
            ContinuationMode.EXTEND,
        ),
        (Sampling(temperature=1.0, seed=1), ContinuationMode.REPLAY),
        (Sampling(temperature=0.0, presence_penalty=0.5), ContinuationMode.REPLAY),
        (Sampling(temperature=0.0, frequency_penalty=0.5), ContinuationMode.REPLAY),
        (Sampling(temperature=0.0, n=2), ContinuationMode.REPLAY),
        (Sampling(temperature=1.0, seed=1, n=2), ContinuationMode.REPLAY),
        (Sampling(temperature=1.0, n=2), ContinuationMode.NEITHER),
        (Sampling(temperature=1.0, presence_penalty=0.5), ContinuationMode.NEITHER),
        (Sampling(temperature=1.0, allowed_token_ids=(1, 2), prompt_logprobs=1), ContinuationMode.EXTEND),
        (Sampling(temperature=0.0, bad_words=("x y",)), ContinuationMode.REPLAY),
        (Sampling(temperature=1.0, thinking_tokens=9), ContinuationMode.NEITHER),
        (
            Sampling(temperature=0.0, structured=StructuredOutput(Constraint.JSON_OBJECT)),
            ContinuationMode.EXTEND,
        ),
        (
            Sampling(temperature=1.0, seed=1, structured=StructuredOutput(Constraint.REGEX, "a")),
            ContinuationMode.REPLAY,
        ),
        (
            Sampling(temperature=1.0, structured=StructuredOutput(Constraint.REGEX, "a")),
            ContinuationMode.EXTEND,
        ),
    ],
)
def test_the_way_on_is_the_cheapest_that_is_exact(sampling: Sampling, way: ContinuationMode) -> None:
    assert way_on(sampling) is way


def test_the_prompts_logprobs_are_not_asked_for_again() -> None:
    request = Request("r", "m", token_ids([1]), Sampling(prompt_logprobs=2, logprobs=1))
    sampling = extended(request, ChoiceOutput(token_ids([5])))[0].sampling
    assert (sampling.prompt_logprobs, sampling.logprobs) == (None, 1)


def test_an_extended_request_ends_with_what_the_client_has_and_forgets_the_prompts_block_names() -> None:
    request = Request("r", "m", token_ids([1, 2]), block_hashes=token_ids([9]))
    current, continuation = extended(request, ChoiceOutput(token_ids([5, 6]), text_length=3))
    assert list(current.tokens) == [1, 2, 5, 6]
    assert not len(current.block_hashes)
    assert (continuation.output_tokens, continuation.text_length) == (2, 3)


def had(tokens: list[int], text: str, *, finished: bool = False) -> ChoiceOutput:
    return ChoiceOutput(token_ids(tokens), len(text), finished)


@given(st.data())
def test_a_replay_that_repeats_itself_passes_exactly_what_the_client_lacks(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 12))
    known = data.draw(st.integers(0, total))
    # The text that the client has may lag behind its tokens, as text is held back for stop strings.
    read = data.draw(st.integers(0, known))
    output = had(list(range(known)), "x" * read)
    replay = ReplayFilter([output])
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
        assert rest.offset == len(output.progress.tokens)
        assert rest.token_ids == tuple(range(max(known, at), at + step))
        output.add(rest)
        at, written = at + step, written + len(text)
    assert list(output.progress.tokens) == list(range(total))
    assert output.progress.characters == total
    assert output.finished
    assert replay.open_choices == 0


PARTS = (
    ("reasoning", 0, "let me think"),
    ("content", 0, "I will call two tools"),
    ("call", 0, '{"city":"Bern"}'),
    ("call", 1, '{"city":"Rome"}'),
)


def parsed(attempt: str, cuts: list[int]) -> list[Delta]:
    """A stream that says PARTS, one token and one raw character for each of their characters, in steps that
    begin at `cuts`; tool calls have ids of that attempt."""
    said = [(kind, index, at, char) for kind, index, text in PARTS for at, char in enumerate(text)]
    bounds = [0, *sorted(set(cuts)), len(said)]
    deltas = []
    for start, end in itertools.pairwise(bounds):
        step = said[start:end]
        calls = [
            ToolCallDelta(index, f"{attempt}-{index}", f"f{index}", char)
            if at == 0
            else ToolCallDelta(index, arguments=char)
            for kind, index, at, char in step
            if kind == "call"
        ]
        deltas.append(
            Delta(
                "r",
                start,
                tuple(range(start, end)),
                "".join(char for kind, _, _, char in step if kind == "content"),
                reasoning="".join(char for kind, _, _, char in step if kind == "reasoning"),
                tool_calls=tuple(calls),
                raw_length=end - start,
                finish=FinishReason.STOP if end == len(said) else None,
                last=end == len(said),
            )
        )
    return deltas


LENGTH = sum(len(text) for _, _, text in PARTS)
CUTS = st.lists(st.integers(1, LENGTH - 1), max_size=12)


@given(first=CUTS, second=CUTS, lost=st.integers(0, 12))
def test_a_replay_of_text_that_is_taken_apart_passes_each_part_exactly_once(
    first: list[int], second: list[int], lost: int
) -> None:
    output = ChoiceOutput(token_ids([]))
    had_deltas = parsed("a", first)[:-1][:lost]
    client = list(had_deltas)
    for delta in had_deltas:
        output.add(delta)
    replay = ReplayFilter([output])
    for delta in parsed("b", second):
        assert replay.fault(delta) is None
        rest = replay.rest(delta)
        assert rest.offset == len(output.progress.tokens)
        output.add(rest)
        client.append(rest)
    assert "".join(delta.reasoning for delta in client) == PARTS[0][2]
    assert "".join(delta.text for delta in client) == PARTS[1][2]
    for index in (0, 1):
        calls = [call for delta in client for call in delta.tool_calls if call.index == index]
        assert "".join(call.arguments for call in calls) == PARTS[2 + index][2]
        assert [call.name for call in calls if call.name] == [f"f{index}"]
        assert len([call.call_id for call in calls if call.call_id]) == 1
    assert sum(delta.raw_length or 0 for delta in client) == output.progress.characters == LENGTH


def test_a_replay_does_not_tell_the_prompts_logprobs_twice() -> None:
    replay = ReplayFilter([had([1], "a")])
    assert replay.rest(Delta("r", 0, (1,), "a", prompt_logprobs=(None,))).prompt_logprobs == ()


@pytest.mark.parametrize(
    ("delta", "fault"),
    [
        (Delta("r", 0, (1, 3)), "did not repeat"),
        (Delta("r", 0, (1,), finish=FinishReason.STOP), "ends at token 1, of 2"),
    ],
)
def test_a_replay_that_differs_is_found_out(delta: Delta, fault: str) -> None:
    found = ReplayFilter([had([1, 2], "ab")]).fault(delta)
    assert found is not None
    assert fault in found


def test_a_choice_that_had_ended_ends_in_silence_and_must_end_at_the_same_place() -> None:
    outputs = [had([1, 2], "ab", finished=True), had([4], "d")]
    replay = ReplayFilter(outputs)
    rest = replay.rest(Delta("r", 0, (1, 2), "ab", finish=FinishReason.STOP))
    assert (rest.token_ids, rest.text, rest.finish) == ((), "", None)
    assert replay.open_choices == 1
    beyond = ReplayFilter(outputs).fault(Delta("r", 0, (1, 2, 3)))
    assert beyond is not None
    assert "had ended" in beyond
