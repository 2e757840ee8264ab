"""A lane sends what the ordinary path would have sent, once and in order, and to its own client only."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.lanes import socket_lane, stream_gaps

from kvasir.core.kv import KvBatch
from kvasir.core.messages import EncodedStep, WorkerFrame
from kvasir.core.requests import Delta, EngineLoad, FinishReason, StepBatch, Usage
from kvasir.native import IS_NATIVE, Fan, Lane, Relay, StreamTokens
from kvasir.native import _twin_lanes as twin
from kvasir.telemetry.families.updated import Histogram
from kvasir.wire.codec import decode_to_router, encode_to_router

pytestmark = pytest.mark.skipif(not IS_NATIVE, reason="the twin opens no lane")

BEFORE, AFTER = b'data: {"text":', b"}\n\n"


@dataclass
class Client:
    """Both ends of one stream: what the client reads, and what waits for it in Python."""

    ends: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)
    gaps: Histogram = field(default_factory=lambda: Histogram((0.1, 1.0)))
    waiting: int = 0
    left: list[bytes] = field(default_factory=list)

    def lane(self, *, chunked: bool = False, plain: bool = True, first_s: float = 0.0) -> Lane:
        return socket_lane(
            self.ends[0].fileno(),
            stream_gaps(self.gaps, first_s=first_s),
            pending=lambda: self.waiting,
            write=self.left.append,
            before=BEFORE,
            after=AFTER,
            chunked=chunked,
            plain=plain,
        )

    def read(self) -> bytes:
        self.ends[1].setblocking(False)
        try:
            return self.ends[1].recv(1 << 20)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        for end in self.ends:
            end.close()


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client()
    yield made
    made.close()


def frame(*deltas: Delta, load: EngineLoad | None = None) -> bytes:
    return encode_to_router(WorkerFrame(1, 0, StepBatch(deltas, load)))


def framed(text: str, *, chunked: bool = False) -> bytes:
    """As Exchange.piece frames it."""
    piece = BEFORE + msgspec.json.encode(text) + AFTER
    return b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2**32 - 1), max_size=3), st.text(max_size=20)), max_size=8),
    st.booleans(),
)
def test_the_client_reads_what_the_ordinary_way_would_have_sent(
    steps: list[tuple[list[int], str]], chunked: bool
) -> None:
    client = Client()
    try:
        fan, tokens, lane = Fan(), StreamTokens(5), client.lane(chunked=chunked)
        fan.add("w", "leg", tokens, lane)
        offsets = accumulate((len(ids) for ids, _ in steps), initial=5)
        for (ids, text), offset in zip(steps, offsets, strict=False):
            assert fan.take("w", frame(Delta("leg", offset, tuple(ids), text)), 1.0)[0] == []
        assert client.read() == b"".join(framed(text, chunked=chunked) for _, text in steps if text)
        assert list(tokens.tokens) == [each for ids, _ in steps for each in ids]
        assert lane.open, "reading the progress does not close the lane"
        assert tokens.characters == sum(len(text) for _, text in steps)
        assert sum(client.gaps.counts) == len(tokens.tokens) == tokens.count - 5
    finally:
        client.close()


def test_gaps_between_tokens_are_counted_as_the_ordinary_way_counts_them(client: Client) -> None:
    fan, lane, expected = Fan(), client.lane(first_s=10.0), Histogram((0.1, 1.0))
    fan.add("w", "leg", StreamTokens(), lane)
    at = 0
    for now, before, count in ((10.1, 10.0, 1), (10.5, 10.1, 2), (14.0, 10.5, 1)):
        fan.take("w", frame(Delta("leg", at, tuple(range(count)), "x")), now)
        expected.observe((now - before) / count, count)
        at += count
    assert list(client.gaps.counts) == list(expected.counts)
    assert client.gaps.total[0] == pytest.approx(expected.total[0])


PLAIN = Delta("leg", 0, (7,), "a")


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(replace(PLAIN, offset=1), id="a gap"),
        pytest.param(replace(PLAIN, index=1), id="another choice"),
        pytest.param(replace(PLAIN, finish=FinishReason.STOP, last=True), id="the end"),
        pytest.param(replace(PLAIN, usage=Usage(cached_tokens=1)), id="usage"),
        pytest.param(replace(PLAIN, raw_length=1), id="a text that was taken apart"),
    ],
)
def test_what_is_not_just_the_next_piece_ends_the_lane_and_is_left(client: Client, odd: Delta) -> None:
    fan, tokens, lane = Fan(), StreamTokens(), client.lane()
    fan.add("w", "leg", tokens, lane)
    assert fan.take("w", frame(odd, PLAIN), 1.0)[0] == [0, 1], "nothing may overtake it"
    assert not lane.open
    assert (client.read(), tokens.count, len(fan)) == (b"", 0, 0)


def test_of_a_step_only_what_goes_over_lanes_is_taken(client: Client) -> None:
    fan, lane = Fan(), client.lane()
    fan.add("w", "leg", StreamTokens(), lane)
    others = fan.take("w", frame(Delta("b", 0, (1,), "b"), PLAIN, Delta("c", 0, (2,), "c")), 1.0)[0]
    assert others == [0, 2]
    assert client.read() == framed("a")
    assert fan.take("another", frame(PLAIN), 1.0) == (None, True), "legs are a worker's own"
    assert fan.take("w", frame(load=EngineLoad(running=1)), 1.0) == ([], False)
    changed = encode_to_router(WorkerFrame(1, 0, StepBatch(kv=KvBatch(1, 1, b""))))
    assert fan.take("w", changed, 1.0) == ([], True)


def test_nothing_is_sent_past_what_waits_in_python(client: Client) -> None:
    fan, lane = Fan(), client.lane()
    fan.add("w", "leg", StreamTokens(), lane)
    client.waiting = 1
    assert fan.take("w", frame(PLAIN), 1.0)[0] == [0]
    assert (client.read(), lane.open) == (b"", False)


def test_what_a_full_socket_does_not_take_is_handed_to_python(client: Client) -> None:
    client.ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    fan, tokens, lane = Fan(), StreamTokens(), client.lane()
    fan.add("w", "leg", tokens, lane)
    text = "x" * (1 << 20)
    assert fan.take("w", frame(Delta("leg", 0, (7,), text)), 1.0)[0] == []
    read = client.read()
    assert 0 < len(read) < len(text)
    assert read + b"".join(client.left) == framed(text)
    assert list(tokens.tokens) == [7]


def test_what_must_be_encrypted_is_handed_to_python_as_a_whole(client: Client) -> None:
    fan, tokens, lane = Fan(), StreamTokens(), client.lane(plain=False)
    fan.add("w", "leg", tokens, lane)
    assert fan.take("w", frame(PLAIN), 1.0)[0] == []
    assert (client.read(), client.left, lane.open) == (b"", [framed("a")], True)
    assert tokens.count == 1


def test_what_a_client_that_has_left_does_not_take_is_handed_to_python(client: Client) -> None:
    fan, lane = Fan(), client.lane()
    fan.add("w", "leg", StreamTokens(), lane)
    client.ends[1].close()
    assert fan.take("w", frame(PLAIN), 1.0)[0] == []
    assert client.left == [framed("a")]


def test_a_later_socket_of_the_same_number_gets_nothing(client: Client) -> None:
    fan, lane = Fan(), client.lane()
    fan.add("w", "leg", StreamTokens(), lane)
    other = Client()
    try:
        # What close() and a new connection lead to.
        os.dup2(other.ends[0].fileno(), client.ends[0].fileno())
        assert fan.take("w", frame(PLAIN), 1.0)[0] == [0]
        assert (other.read(), lane.open) == (b"", False)
    finally:
        other.close()


def test_a_lane_on_no_socket_is_closed_from_the_start(client: Client) -> None:
    readable, writable = os.pipe()
    try:
        lane = socket_lane(writable, stream_gaps(client.gaps), write=client.left.append)
        assert not lane.open
        fan = Fan()
        fan.add("w", "leg", StreamTokens(), lane)
        assert len(fan) == 0
    finally:
        os.close(readable)
        os.close(writable)


def test_a_closed_lane_a_dropped_lane_and_a_dropped_fan_leave_nothing_behind(client: Client) -> None:
    fan = Fan()
    lane, dropped = client.lane(), client.lane()
    fan.add("w", "leg", StreamTokens(), lane)
    fan.add("w", "other", StreamTokens(), dropped)
    assert len(fan) == 2
    lane.close()
    lane.close()
    del dropped
    assert len(fan) == 0
    assert fan.take("w", frame(PLAIN), 1.0) == (None, True)
    last = client.lane()
    fan.add("w", "leg", StreamTokens(), last)
    del fan
    assert not last.open


def test_a_leg_has_one_lane_and_a_lane_one_leg(client: Client) -> None:
    fan, lane = Fan(), client.lane()
    fan.add("w", "leg", StreamTokens(), lane)
    with pytest.raises(ValueError, match="one lane"):
        fan.add("w", "leg", StreamTokens(), client.lane())
    with pytest.raises(ValueError, match="its place"):
        fan.add("w", "other", StreamTokens(), lane)


def test_buffers_that_are_no_histogram_are_refused(client: Client) -> None:
    client.gaps.counts.append(0)
    with pytest.raises(ValueError, match="a count more than bounds"):
        client.lane()


def test_after_a_fence_a_lane_sends_nothing(client: Client) -> None:
    fan, tokens, lane = Fan(), StreamTokens(), client.lane()
    fan.add("w", "leg", tokens, lane)
    tokens.fence()
    assert fan.take("w", frame(PLAIN), 1.0)[0] == [0]
    assert (client.read(), lane.open, tokens.count) == (b"", False, 0)
    fan.add("w", "leg", tokens, later := client.lane())
    assert fan.take("w", frame(PLAIN), 1.0)[0] == []
    assert (later.open, tokens.count) == (True, 1)


def test_what_the_ordinary_path_adds_is_what_the_lane_expects_next(client: Client) -> None:
    fan, tokens, lane = Fan(), StreamTokens(), client.lane()
    fan.add("w", "leg", tokens, lane)
    tokens.add((1, 2), 3)
    assert fan.take("w", frame(Delta("leg", 2, (7,), "a")), 1.0)[0] == []
    assert (list(tokens.tokens), tokens.characters, lane.open) == ([1, 2, 7], 4, True)


ids_lists = st.lists(st.integers(0, 2**32 - 1), max_size=3)
additions = st.lists(st.tuples(ids_lists, st.integers(0, 9)), max_size=8)


@given(st.integers(0, 5), additions, st.integers(0, 30), st.integers(0, 30))
def test_both_kinds_of_tokens_are_the_same(
    start: int, added: list[tuple[list[int], int]], begin: int, end: int
) -> None:
    native, python = StreamTokens(start), twin.StreamTokens(start)
    for ids, characters in added:
        native.add(ids, characters)
        python.add(ids, characters)
    assert (native.count, native.characters) == (python.count, python.characters)
    assert native.tokens == python.tokens
    assert native.slice(begin, end) == python.slice(begin, end)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 2)), max_size=8))
def test_both_kinds_of_gaps_are_the_same(steps: list[tuple[int, float]]) -> None:
    histograms = [Histogram((0.1, 1.0)), Histogram((0.1, 1.0))]
    native = stream_gaps(histograms[0], first_s=None)
    python = twin.StreamGaps(histograms[1].bounds, histograms[1].counts, histograms[1].total)
    now = 0.0
    for tokens, gap in steps:
        now += gap
        native.add(tokens, now)
        python.add(tokens, now)
        assert (native.count, native.last_s) == (python.count, python.last_s)
    assert histograms[0].counts == histograms[1].counts
    assert histograms[0].total == histograms[1].total


def test_the_twin_leaves_everything_to_the_ordinary_way(client: Client) -> None:
    gaps = client.gaps
    lane = twin.SocketLane(
        fd=client.ends[0].fileno(),
        plain=True,
        pending=lambda: 0,
        write=client.left.append,
        before=BEFORE,
        after=AFTER,
        chunked=False,
        gaps=twin.StreamGaps(gaps.bounds, gaps.counts, gaps.total),
    )
    fan = twin.Fan()
    fan.add("w", "leg", twin.StreamTokens(), lane)
    assert (lane.open, len(fan), fan.take("w", frame(PLAIN), 1.0)) == (False, 0, (None, True))
    lane.close()
    twin.StreamTokens().fence()


def test_a_relay_says_the_same_deltas_of_requests_instead_of_legs() -> None:
    woken: list[int] = []
    relay, fan = Relay(lambda: woken.append(1)), Fan()
    lanes = [relay.lane(f"request-{i}") for i in range(2)]
    tokens = [StreamTokens(), StreamTokens(300)]
    for i, lane in enumerate(lanes):
        fan.add("w", f"leg-{i}", tokens[i], lane)
    step = (Delta("leg-0", 0, (1, 300), "a☃"), Delta("leg-1", 300, (), "b"), Delta("leg-0", 2, (2,), ""))
    assert fan.take("w", frame(*step), 1.0) == ([], False)
    assert (len(woken), len(relay) > 0) == (1, True)
    assert (list(tokens[0].tokens), tokens[0].characters) == ([1, 300, 2], 2)
    message = decode_to_router(relay.take())
    assert isinstance(message, WorkerFrame)
    assert isinstance(message.payload, EncodedStep)
    assert message.payload.decode(None).deltas == tuple(
        replace(delta, request_id=delta.request_id.replace("leg", "request")) for delta in step
    )
    assert len(relay) == 0
