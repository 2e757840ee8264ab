"""Frames between edges and their core: every message arrives however its bytes are split, and anything else
is an error of the link."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.errors import ProtocolError
from kvasir.core.requests import (
    Delta,
    FinishReason,
    PositionLogprobs,
    Request,
    Sampling,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from kvasir.ports.limits import BucketLevels, Grant, LimitRefusal, Quota
from kvasir.ports.router import RequestSummary
from kvasir_platform.edge import frames as module
from kvasir_platform.edge.frames import (
    Ended,
    ErrorNote,
    Frames,
    LimitRequest,
    LimitResponse,
    LimitSettled,
    ToCore,
    ToEdge,
    frames,
)

texts = st.text(max_size=20)
counts = st.integers(0, (1 << 32) - 1)
times = st.floats(allow_nan=False, allow_infinity=False, width=32)


def arrays(code: str, of: st.SearchStrategy[Any]) -> st.SearchStrategy[array[Any]]:
    return st.lists(of, max_size=8).map(lambda values: array(code, values))


logprobs = st.builds(TokenLogprob, counts, texts, times)
positions = st.builds(PositionLogprobs, logprobs, st.lists(logprobs, max_size=2).map(tuple))
deltas = st.builds(
    Delta,
    texts,
    counts,
    token_ids=st.lists(counts, max_size=4).map(tuple),
    text=texts,
    index=st.integers(0, 8),
    logprobs=st.lists(positions, max_size=2).map(tuple),
    finish=st.none() | st.sampled_from(FinishReason),
    usage=st.none() | st.builds(Usage, counts, counts),
    tool_calls=st.lists(st.builds(ToolCallDelta, counts, texts), max_size=2).map(tuple),
    raw_length=st.none() | counts,
    prompt_logprobs=st.lists(st.none() | positions, max_size=2).map(tuple),
    embedding=st.none() | arrays("f", times),
)
requests = st.builds(
    Request,
    texts,
    texts,
    arrays("I", counts),
    st.builds(Sampling, max_tokens=st.none() | counts, temperature=times, n=counts),
    adapter=st.none() | texts,
    deadline_s=st.none() | times,
    block_hashes=arrays("Q", st.integers(0, (1 << 64) - 1)),
    session=texts,
    tenant=texts,
)
summaries = st.builds(RequestSummary, texts, texts, texts, times, times, refused=st.booleans())
errors = st.builds(ErrorNote, texts, texts, texts, counts, st.none() | texts, times)
quotas = st.builds(Quota, st.none() | counts, st.none() | counts, st.none() | counts)
levels = st.builds(BucketLevels, times, times)
leaves = st.builds(LimitResponse, counts, grant=st.builds(Grant, texts, quotas, counts, levels)) | st.builds(
    LimitResponse,
    counts,
    refusal=st.builds(LimitRefusal, st.sampled_from(["requests", "tokens"]), times, levels),
)
to_core = st.builds(
    ToCore,
    submits=st.lists(requests, max_size=3),
    cancels=st.lists(texts, max_size=3),
    named=st.lists(st.tuples(texts, st.lists(texts, max_size=2).map(tuple)), max_size=2),
    takes=st.lists(st.builds(LimitRequest, counts, texts, quotas, counts), max_size=2),
    settled=st.lists(st.builds(LimitSettled, counts, st.none() | counts), max_size=2),
    started=st.none() | st.tuples(texts, counts),
    beat=counts,
)
to_edge = st.builds(
    ToEdge,
    deltas=st.lists(deltas, max_size=3),
    ends=st.lists(st.builds(Ended, summaries, st.none() | errors), max_size=2),
    leaves=st.lists(leaves, max_size=2),
    drain=st.booleans(),
)


def plain(value: Any) -> Any:
    """A value without the classes that carry it."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "__struct_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def sent(message: ToCore | ToEdge) -> bytes:
    def refuse(too_large: object) -> None:
        raise AssertionError(too_large)

    return b"".join(frames(message, refuse))


@given(st.lists(to_core | to_edge, max_size=3), st.data())
def test_what_is_said_arrives_however_it_is_cut(messages: list[ToCore | ToEdge], data: st.DataObject) -> None:
    for kind in (ToCore, ToEdge):
        mine = [message for message in messages if isinstance(message, kind)]
        stream = b"".join(map(sent, mine))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
        reader = Frames(kind)
        got = [
            frame
            for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
            for frame in reader.take(stream[begin:end])
        ]
        assert plain(got) == plain(mine)


@given(st.binary(max_size=200))
def test_what_is_no_frame_is_an_error_of_the_link_or_waits_for_more(data: bytes) -> None:
    for kind in (ToCore, ToEdge):
        try:
            Frames(kind).take(data)
        except ProtocolError:
            continue


@given(st.binary(max_size=60), st.integers(0, 400))
def test_a_frame_of_another_shape_is_refused(body: bytes, at: int) -> None:
    good = bytearray(sent(ToEdge(deltas=[Delta("r", 0, (1,), "text", embedding=array("f", [1.0]))])))
    at = 4 + at % (len(good) - 4)
    good[at : at + len(body)] = body[: len(good) - at]
    try:
        Frames(ToEdge).take(bytes(good))
    except ProtocolError:
        return


def test_a_length_beyond_the_bound_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        Frames(ToCore).take((module.MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


def test_what_does_not_fit_one_frame_goes_in_several_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FRAME_BYTES", 4_000)
    summary = RequestSummary("r9", "m", "ok", 0.0, 1.0)
    message = ToEdge(
        deltas=[Delta(f"r{i}", 0, (i,), "x" * 1_500) for i in range(10)], ends=[Ended(summary)], drain=True
    )
    refused: list[ToCore | ToEdge] = []
    parts = list(frames(message, refused.append))
    assert len(parts) > 2
    assert not refused
    got = Frames(ToEdge).take(b"".join(parts))
    assert [delta.token_ids[0] for frame in got for delta in frame.deltas] == list(range(10))
    assert [len(frame.ends) for frame in got] == [0] * (len(got) - 1) + [1]
    assert [frame.drain for frame in got].count(True) == 1


def test_what_is_too_large_by_itself_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FRAME_BYTES", 2_000)
    message = ToCore(
        submits=[Request("big", "m", array("I", range(1_000))), Request("small", "m", array("I", [1]))]
    )
    refused: list[ToCore | ToEdge] = []
    got = Frames(ToCore).take(b"".join(frames(message, refused.append)))
    assert [each.request_id for frame in got for each in frame.submits] == ["small"]
    assert [plain(each)["submits"][0]["request_id"] for each in refused] == ["big"]
