"""The control connection: authentication, refusals, and bounded waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from kvasir.core.errors import TransferError
from kvasir_workers.transfer.common.lease_keys import lease_key
from kvasir_workers.transfer.nccl.control import MAGIC, NONCE_BYTES, Control, Greeting, LeaseClaim, Waker
from kvasir_workers.transfer.nccl.messages import (
    MAX_FRAME_BYTES,
    Chunk,
    Confirm,
    End,
    Message,
    Opening,
    PairProven,
    PullRequest,
    StorePut,
    Withdraw,
    encode,
)

SECRET = b"s" * 32
CLAIM = LeaseClaim("lease", 7, lease_key(SECRET, "lease", 7))
MESSAGES: list[Message] = [
    StorePut("0/1", b"\x00\xff"),
    PairProven(),
    PullRequest(1, "lease", 7, 3, 40, 1, 2, 1, 2, b"\x00\xff" * 16),
    Opening(1, 0, 2, b"\x00\xff" * 8),
    Chunk(1, 0, 12),
    End(1, "expired", "lease has ended"),
    Withdraw(2),
    Confirm(3),
]


@dataclass
class Ends:
    """Two ends of a connection, the raw socket of the second, and the first's waker."""

    first: Control
    second: Control
    raw: socket.socket
    waker: Waker


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    wakers = Waker(), Waker()
    first, second = Control(near, wakers[0], time.monotonic), Control(far, wakers[1], time.monotonic)
    yield Ends(first, second, far, wakers[0])
    first.close()
    second.close()
    for waker in wakers:
        waker.close()


def soon() -> float:
    return time.monotonic() + 20.0


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[str]]:
    """Run it beside the test; the message of its TransferError, if any, is in the list at the end."""
    raised: list[str] = []

    def run() -> None:
        try:
            call()
        except TransferError as error:
            raised.append(error.message)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_who_has_a_ticket_is_let_in_and_both_understand_each_other(ends: Ends) -> None:
    thread, refused = in_thread(lambda: ends.first.admit(SECRET, soon()))
    ends.second.enter(CLAIM, soon())
    thread.join()
    assert refused == []
    for message in MESSAGES:
        ends.first.send(message)
    found: list[Message] = []
    while len(found) < len(MESSAGES):
        found += ends.second.receive(soon())
    assert found == MESSAGES


@pytest.mark.parametrize(
    "claim",
    [
        replace(CLAIM, key=b"x" * 32),
        replace(CLAIM, key=SECRET),
        replace(CLAIM, fence=8),
        replace(CLAIM, lease_id="another"),
    ],
    ids=["guessed", "secret", "fence", "lease"],
)
def test_who_has_no_ticket_for_the_lease_that_it_names_is_refused(ends: Ends, claim: LeaseClaim) -> None:
    thread, refused = in_thread(lambda: _admit_and_close(ends))
    with pytest.raises(TransferError, match="before authentication"):
        ends.second.enter(claim, soon())
    thread.join()
    assert refused == ["it has no ticket of this agent's"]


def test_a_proof_is_worth_nothing_on_another_connection(ends: Ends) -> None:
    thread, refused = in_thread(lambda: _admit_and_close(ends))
    # What a puller wrote on a connection whose server chose other nonces.
    overheard = Greeting(CLAIM.key, bytes(NONCE_BYTES) * 2).proof(b"pull")
    name = CLAIM.lease_id.encode()
    ends.raw.sendall(bytes(NONCE_BYTES) + overheard + (7).to_bytes(8, "little") + b"\x05\x00" + name)
    thread.join()
    assert refused == ["it has no ticket of this agent's"]


def test_a_name_that_no_lease_has_is_not_read(ends: Ends) -> None:
    thread, refused = in_thread(lambda: _admit_and_close(ends))
    ends.raw.sendall(bytes(NONCE_BYTES + 32 + 8) + b"\xff\xff")
    thread.join()
    assert refused == ["it named no lease"]


def _admit_and_close(ends: Ends) -> None:
    try:
        ends.first.admit(SECRET, soon())
    finally:
        ends.first.close()


def test_a_server_that_did_not_issue_the_ticket_is_refused(ends: Ends) -> None:
    entering, refused = in_thread(lambda: ends.first.enter(CLAIM, soon()))
    ends.raw.sendall(MAGIC + bytes(32) + bytes(32))
    entering.join()
    assert refused == ["the peer at this address did not issue this ticket"]


def test_another_protocol_is_recognised(ends: Ends) -> None:
    ends.raw.sendall(b"HTTP/1.1 400 Bad Request\r\n" + bytes(64))
    with pytest.raises(TransferError, match="not a transfer agent"):
        ends.first.enter(CLAIM, soon())


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "exceeds"),
        (b"\x03\x00\x00\x00abc", "not a control message"),
        (b"\x02\x00\x00\x00\x91\xa1", "not a control message"),
    ],
)
def test_what_is_no_message_ends_the_connection(ends: Ends, raw: bytes, reason: str) -> None:
    ends.raw.sendall(raw)
    with pytest.raises(TransferError, match=reason):
        ends.first.receive(soon())


def test_a_message_in_pieces_is_put_together(ends: Ends) -> None:
    payload = encode(Confirm(3))
    whole = len(payload).to_bytes(4, "little") + payload
    for byte in whole[:-1]:
        ends.raw.sendall(bytes([byte]))
        ends.first.wait(20.0)
        assert ends.first.take() == []
    ends.raw.sendall(whole[-1:])
    assert ends.first.receive(soon()) == [Confirm(3)]


def test_a_closed_connection_is_noticed(ends: Ends) -> None:
    ends.second.close()
    with pytest.raises(TransferError, match="closed"):
        ends.first.receive(soon())


def test_waits_end_when_woken_and_for_good_when_stopped(ends: Ends) -> None:
    ends.waker.wake()
    ends.first.wait(600.0)
    thread, raised = in_thread(lambda: _receive(ends.first))
    ends.waker.stop()
    thread.join()
    assert raised == ["this agent ended the connection"]
    ends.waker.close()
    ends.waker.wake()


def _receive(control: Control) -> None:
    control.receive(time.monotonic() + 600.0)


def test_an_answer_that_does_not_come_is_waited_for_until_the_deadline(ends: Ends) -> None:
    with pytest.raises(TransferError, match="did not answer"):
        ends.first.receive(time.monotonic() + 0.05)


def test_a_connection_is_waited_for_as_long_as_the_other_side_is_there(ends: Ends) -> None:
    mine, theirs = ends.first, ends.second
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs.send(PairProven())
        assert not mine.comes_to(listener, soon())
        assert mine.take() == [PairProven()]
        with socket.create_connection(listener.getsockname()):
            assert mine.comes_to(listener, soon())
            listener.accept()[0].close()
        with pytest.raises(TransferError, match="did not connect"):
            mine.comes_to(listener, time.monotonic())
        theirs.close()
        assert not mine.comes_to(listener, soon())
