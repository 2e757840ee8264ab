"""The link delivers every payload exactly once, in order, whatever happens to connections."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.errors import ProtocolError
from kvasir.core.messages import Abort, Draining, Submit
from kvasir.core.requests import Delta, EngineRequest, Sampling, StepBatch, token_ids
from kvasir.core.session_link import TAIL_OVERFLOW, LinkLimits, SessionLink, payload_bytes

LIMITS = LinkLimits(tail_messages=8, tail_bytes=1000, ack_every=3, ack_delay_s=1.0)

Header = tuple[int, int, str | None]


class End:
    """One end of a session over pipes that the test breaks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.link: SessionLink[str] = SessionLink(LIMITS)
        self.sent: list[str] = []
        self.got: list[str] = []
        self.pipe: deque[Header] = deque()

    def push(self) -> None:
        payload = f"{self.name}{len(self.sent)}"
        if self.link.unacknowledged < LIMITS.tail_messages:
            self.link.push(payload, 1)
            self.sent.append(payload)

    def write(self) -> None:
        item = self.link.take()
        if item is not None:
            self.pipe.append((item[0], self.link.take_ack(), item[1]))

    def acknowledge(self) -> None:
        self.pipe.append((self.link.sent_seq, self.link.take_ack(), None))

    def read(self, peer: End) -> None:
        if peer.pipe:
            self.take_in(peer.pipe.popleft())

    def take_in(self, frame: Header) -> None:
        seq, ack, payload = frame
        if self.link.receive(seq, ack, has_payload=payload is not None, now=0.0):
            assert payload is not None
            self.got.append(payload)


def reconnect(a: End, b: End) -> None:
    a.pipe.clear()
    b.pipe.clear()
    hello, welcome = a.link.received_seq, b.link.received_seq
    b.link.resume(hello)
    a.link.resume(welcome)


ACTIONS = st.lists(
    st.tuples(st.booleans(), st.sampled_from(["push", "write", "acknowledge", "read", "repeat", "cut"])),
    max_size=200,
)


@given(ACTIONS)
def test_any_interleaving_of_breaks_and_duplicates_delivers_all_exactly_once_in_order(
    actions: list[tuple[bool, str]],
) -> None:
    a, b = End("a"), End("b")
    for swap, action in actions:
        one, other = (b, a) if swap else (a, b)
        match action:
            case "push":
                one.push()
            case "write":
                one.write()
            case "acknowledge":
                one.acknowledge()
            case "read":
                one.read(other)
            case "repeat" if other.pipe:
                one.take_in(other.pipe[0])
            case _:
                reconnect(a, b)
        assert a.got == b.sent[: len(a.got)]
        assert b.got == a.sent[: len(b.got)]
        assert one.link.unacknowledged <= LIMITS.tail_messages
    reconnect(a, b)
    for end in (a, b):
        for _ in range(LIMITS.tail_messages):
            end.write()
    while a.pipe or b.pipe:
        a.read(b)
        b.read(a)
    assert a.got == b.sent
    assert b.got == a.sent
    a.acknowledge()
    b.read(a)
    assert b.link.unacknowledged == 0


def test_a_payload_that_comes_again_is_dropped() -> None:
    link: SessionLink[str] = SessionLink(LIMITS)
    assert link.receive(1, 0, has_payload=True, now=0.0)
    assert link.receive(2, 0, has_payload=True, now=0.0)
    assert not link.receive(1, 0, has_payload=True, now=0.0)
    assert not link.receive(2, 0, has_payload=True, now=0.0)
    assert link.received_seq == 2


def test_a_gap_ends_the_session() -> None:
    link: SessionLink[str] = SessionLink(LIMITS)
    assert link.receive(1, 0, has_payload=True, now=0.0)
    with pytest.raises(ProtocolError, match="gap: expected frame 2, got 3"):
        link.receive(3, 0, has_payload=True, now=0.0)


def test_an_acknowledgement_that_tells_of_unseen_payloads_ends_the_session() -> None:
    link: SessionLink[str] = SessionLink(LIMITS)
    with pytest.raises(ProtocolError, match="gap"):
        link.receive(1, 0, has_payload=False, now=0.0)


def test_acknowledging_what_was_never_sent_ends_the_session() -> None:
    link: SessionLink[str] = SessionLink(LIMITS)
    link.push("queued", 1)
    with pytest.raises(ProtocolError, match="acknowledges 1"):
        link.receive(0, 1, has_payload=False, now=0.0)


def test_resuming_behind_an_acknowledgement_is_refused() -> None:
    link: SessionLink[str] = SessionLink(LIMITS)
    link.push("one", 1)
    link.take()
    link.receive(0, 1, has_payload=False, now=0.0)
    with pytest.raises(ProtocolError, match="had acknowledged"):
        link.resume(0)


@pytest.mark.parametrize("size", [1, 400])
def test_a_tail_beyond_its_messages_or_bytes_overflows_by_name(size: int) -> None:
    link: SessionLink[str] = SessionLink(LIMITS)
    for _ in range(min(LIMITS.tail_messages, LIMITS.tail_bytes // size)):
        link.push("x", size)
    with pytest.raises(ProtocolError) as caught:
        link.push("x", size)
    assert caught.value.code == TAIL_OVERFLOW


@pytest.mark.parametrize(("payloads", "size"), [(5, 1), (2, 300)])
def test_a_tail_is_half_full_by_its_messages_or_by_its_bytes(payloads: int, size: int) -> None:
    link: SessionLink[str] = SessionLink(LIMITS)
    for at in range(payloads):
        assert not link.half_full
        link.push("x", size)
        link.take()
        assert link.unacknowledged == at + 1
    assert link.half_full
    link.receive(0, 1, has_payload=False, now=0.0)
    assert not link.half_full


def test_acknowledged_payloads_make_room_in_the_tail() -> None:
    link: SessionLink[str] = SessionLink(LIMITS)
    for _ in range(10):
        link.push("x", 900)
        item = link.take()
        assert item is not None
        link.receive(0, item[0], has_payload=False, now=0.0)
    assert link.unacknowledged == 0


def test_an_acknowledgement_is_due_after_enough_payloads_or_enough_time() -> None:
    link: SessionLink[str] = SessionLink(LIMITS)
    assert not link.ack_due(100.0)
    link.receive(1, 0, has_payload=True, now=100.0)
    assert link.ack_due_s == 101.0
    assert not link.ack_due(100.9)
    assert link.ack_due(101.0)
    assert link.take_ack() == 1
    assert not link.ack_due(200.0)
    for seq in (2, 3, 4):
        link.receive(seq, 0, has_payload=True, now=200.0)
    assert link.ack_due(200.0)


def test_the_estimate_of_a_payloads_size_grows_with_what_it_carries() -> None:
    small = Submit((EngineRequest("r", token_ids([1]), Sampling()),))
    large = Submit((EngineRequest("r", token_ids(range(1000)), Sampling()),))
    assert payload_bytes(large) - payload_bytes(small) == 4 * 999
    assert payload_bytes(Abort(("a" * 100,))) > 100
    assert payload_bytes(Draining("é" * 10, 1.0)) >= 20
    assert payload_bytes(StepBatch((Delta("r", 0, (1,), "x" * 50),))) > 50
