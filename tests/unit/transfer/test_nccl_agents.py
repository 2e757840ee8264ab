"""NCCL agents beyond the port's contract: unauthorized peers, peers that violate the protocol or stop within
a chunk, and the state after an agent is closed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import pytest
from msgspec import structs

torch = pytest.importorskip("torch")

from tests.kit.engines.transfer_peers import LAYERS, LocalPeer  # noqa: E402

from kvasir.core.errors import TransferError  # noqa: E402 - after the skip
from kvasir.core.identity import HEAD_MAJOR, KvLayout  # noqa: E402
from kvasir.ports.transfer import (  # noqa: E402
    UNSHARDED,
    BlockPart,
    LeaseEnded,
    Offer,
    PeersRefused,
    PullFailed,
    PullSucceeded,
    TransferEvent,
)
from kvasir_workers.transfer.common.lease_keys import (  # noqa: E402
    SECRET_BYTES,
    issue,
    opened,
    opened_one,
    seal,
)
from kvasir_workers.transfer.nccl import receiving, serving  # noqa: E402
from kvasir_workers.transfer.nccl.adapter import NcclTransfer  # noqa: E402
from kvasir_workers.transfer.nccl.control import Control, LeaseClaim, Waker, request_proof  # noqa: E402
from kvasir_workers.transfer.nccl.endpoint import VERSION, NcclEndpoint, decode, encode  # noqa: E402
from kvasir_workers.transfer.nccl.group import Fabric, NcclGroupLink  # noqa: E402
from kvasir_workers.transfer.nccl.local import tag  # noqa: E402
from kvasir_workers.transfer.nccl.meeting import meet_puller  # noqa: E402
from kvasir_workers.transfer.nccl.messages import (  # noqa: E402
    Chunk,
    Confirm,
    End,
    Message,
    Opening,
    PullRequest,
    StorePut,
)
from kvasir_workers.transfer.nccl.pulls import NcclPull  # noqa: E402

HOST = "127.0.0.1"
BLOCK_BYTES = 256 << 10
PATIENCE_S = 20.0


def events(peer: LocalPeer, wanted: int = 1) -> list[TransferEvent]:
    found: list[TransferEvent] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(found) < wanted:
        assert time.monotonic() < deadline_s, f"{wanted} events expected, found {found}"
        found += peer.poll()
    return found


def failure(peer: LocalPeer) -> PullFailed:
    (ended,) = events(peer)
    assert isinstance(ended, PullFailed), ended
    return ended


@pytest.fixture
def agent() -> Iterator[Callable[[], LocalPeer]]:
    """Creates started agents, and closes them at the end."""
    made: list[LocalPeer] = []

    def make() -> LocalPeer:
        made.append(LocalPeer(lambda now: NcclTransfer(HOST, now)))
        made[-1].start(BLOCK_BYTES)
        return made[-1]

    yield make
    for peer in made:
        peer.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-nccl")]


@pytest.mark.parametrize("sources", [range(20, 32), [31, 3, 17, 5, 29, 7, 23, 9, 21, 11, 27, 1]])
@pytest.mark.parametrize("targets", [range(40, 52), [51, 33, 47, 35, 59, 37, 53, 39, 61, 41, 57, 63]])
def test_neighbouring_and_scattered_blocks_arrive_alike(
    agent: Callable[[], LocalPeer], sources: Sequence[int], targets: Sequence[int]
) -> None:
    source, target = agent(), agent()
    for block in sources:
        source.write(block, block)
    others = [block for block in range(64) if block not in targets]
    for block in others:
        target.write(block, 99)
    before = [target.read(block) for block in others]
    target.pull("p", source.offer("l", 1, sources, 60.0), 0, targets, 60.0)
    (ended,) = events(target)
    assert isinstance(ended, PullSucceeded), ended
    assert ended.bytes_moved == len(targets) * LAYERS * BLOCK_BYTES
    for theirs, mine in zip(sources, targets, strict=True):
        assert target.read(mine) == source.read(theirs)
    assert [target.read(block) for block in others] == before
    assert events(source) == [LeaseEnded("l", "pulled")]


def guessed(offer: Offer) -> Offer:
    """The offer with a key that its sender did not issue."""
    return replace(offer, endpoint=seal(opened(offer.endpoint)[0], [bytes(SECRET_BYTES)]))


def test_a_stranger_without_a_ticket_is_refused_counted_and_logged_and_others_are_served(
    agent: Callable[[], LocalPeer], caplog: pytest.LogCaptureFixture
) -> None:
    source, target = agent(), agent()
    offer = source.offer("l", 1, [1], 60.0)
    before = target.read(1)
    target.pull("guess", guessed(offer), 0, [1], 60.0)
    assert failure(target).reason == "unreachable"
    assert target.read(1) == before
    assert events(source) == [PeersRefused(1)]
    assert "refused 1 peers without a valid ticket for KV" in caplog.text
    assert offer.endpoint not in caplog.text
    target.pull("p", offer, 0, [1], 60.0)
    assert isinstance(events(target)[0], PullSucceeded)


def test_the_ticket_of_one_lease_opens_no_other_and_does_not_tell_whether_there_is_one(
    agent: Callable[[], LocalPeer],
) -> None:
    source, target = agent(), agent()
    source.write(1, 1)
    mine = source.offer("mine", 1, [1], 60.0)
    target.pull("p", mine, 0, [1], 60.0)
    assert isinstance(events(target)[0], PullSucceeded)
    source.offer("theirs", 1, [2], 60.0)
    assert events(source) == [LeaseEnded("mine", "pulled")]
    before, details = target.read(3), set()
    for lease_id, fence in (("theirs", 1), ("theirs", 2), ("nobody's", 1)):
        target.pull(lease_id, replace(mine, lease_id=lease_id, fence=fence), 0, [3], 60.0)
        refused = failure(target)
        assert refused.reason == "ticket"
        details.add(refused.detail)
    assert len(details) == 1
    assert target.read(3) == before
    assert sum(event.count for event in events(source) if isinstance(event, PeersRefused)) == 3


def test_a_ticket_is_worth_nothing_once_its_lease_has_ended(agent: Callable[[], LocalPeer]) -> None:
    source, target = agent(), agent()
    offer = source.offer("l", 1, [1], 60.0)
    target.pull("once", offer, 0, [1], 60.0)
    assert isinstance(events(target)[0], PullSucceeded)
    assert events(source) == [LeaseEnded("l", "pulled")]
    before = target.read(2)
    target.pull("again", offer, 0, [2], 60.0)
    assert failure(target).reason == "expired"
    assert target.read(2) == before


def test_who_connects_to_the_data_port_in_the_place_of_a_peer_gets_no_block(
    agent: Callable[[], LocalPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = agent(), agent()
    offer = source.offer("l", 1, [1], 60.0)
    tensor = Fabric.tensor
    # Its greeting is right, and what it sends over the group is not.
    monkeypatch.setattr(Fabric, "tensor", lambda fabric, data: tensor(fabric, bytes(len(data))))
    target.pull("p", offer, 0, [1], 60.0)
    assert failure(target).reason == "unreachable"
    assert events(source) == [PeersRefused(1)]


def test_a_pull_that_begins_after_its_thread_failed_gets_the_reason(
    agent: Callable[[], LocalPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = agent(), agent()
    offer = source.offer("l", 1, [1], 60.0)
    begin = receiving.PulledAgent.begin

    def late(puller: receiving.PulledAgent, pull: NcclPull, key: bytes) -> bool:
        puller.end()
        return begin(puller, pull, key)

    monkeypatch.setattr(receiving.PulledAgent, "begin", late)
    target.pull("guess", guessed(offer), 0, [1], 60.0)
    assert failure(target).reason == "unreachable"


def test_a_pull_that_begins_as_its_thread_ends_idle_gets_another(
    agent: Callable[[], LocalPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = agent(), agent()
    begin = receiving.PulledAgent.begin
    ended: list[receiving.PulledAgent] = []

    def idle_once(puller: receiving.PulledAgent, pull: NcclPull, key: bytes) -> bool:
        if not ended:
            ended.append(puller)
            puller.retire()
        return begin(puller, pull, key)

    monkeypatch.setattr(receiving.PulledAgent, "begin", idle_once)
    target.pull("p", source.offer("l", 1, [1], 60.0), 0, [1], 60.0)
    assert isinstance(events(target)[0], PullSucceeded)


def test_connections_that_say_nothing_make_room_for_peers(
    agent: Callable[[], LocalPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_PEERS", 3)
    source, target = agent(), agent()
    offer = source.offer("l", 1, [1], 60.0)
    endpoint = decode(opened_one(offer.endpoint)[0])
    silent = [socket.create_connection((endpoint.host, endpoint.port)) for _ in range(6)]
    target.pull("p", offer, 0, [1], 60.0)
    assert isinstance(events(target)[0], PullSucceeded)
    assert sum(thread.name == "kv-nccl-serve" for thread in threading.enumerate()) <= 3
    for connection in silent:
        connection.close()


def test_an_agent_listens_on_its_host_alone(agent: Callable[[], LocalPeer]) -> None:
    source, target = agent(), agent()
    target.pull("p", source.offer("l", 1, [1], 60.0), 0, [1], 60.0)
    assert isinstance(events(target)[0], PullSucceeded)
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening
    assert set(listening) == {HOST}


def test_a_peer_that_leaves_in_the_middle_costs_its_pull_and_not_the_lease(
    agent: Callable[[], LocalPeer],
) -> None:
    source, leaving, target = agent(), agent(), agent()
    source.write(1, 1)
    offer = source.offer("l", 1, [1], 60.0, 2)
    leaving.pull("p", offer, 0, [5, 6], 60.0)
    deadline_s = time.monotonic() + PATIENCE_S
    while leaving.read(5) != source.read(1):
        assert time.monotonic() < deadline_s
    leaving.close()
    assert failure(leaving).reason == "closed"
    assert source.poll() == []
    source.extend("l", [2])
    target.pull("p", offer, 0, [5, 6], 60.0)
    assert isinstance(events(target)[0], PullSucceeded)
    assert events(source) == [LeaseEnded("l", "pulled")]


@dataclass
class Impostor:
    """A scripted serving agent: it knows the secret and sends what the test specifies. Runs in its own
    thread."""

    say: list[Message]
    secret: bytes = b"s" * 32
    waker: Waker = field(default_factory=Waker)
    go: threading.Event = field(default_factory=threading.Event)
    late: str = ""

    def __post_init__(self) -> None:
        self.listener = socket.create_server((HOST, 0))
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def offer(self, blocks: int) -> Offer:
        layout = KvLayout(32, "float32", HEAD_MAJOR, LAYERS, 4, 32, LAYERS * BLOCK_BYTES, 1)
        port = self.listener.getsockname()[1]
        endpoint = NcclEndpoint(VERSION, HOST, port, "cpu", (BLOCK_BYTES,) * LAYERS, layout)
        ticket = issue(seal(encode(endpoint), [self.secret]), "l", 1)
        return Offer("l", 1, 60.0, tuple(range(blocks)), blocks, ticket)

    def end(self) -> None:
        self.go.set()
        self.thread.join()
        self.listener.close()

    def _serve(self) -> None:
        connection, _ = self.listener.accept()
        control = Control(connection, self.waker, time.monotonic)
        deadline_s = time.monotonic() + PATIENCE_S
        met = meet_puller(control, self.secret, Fabric(HOST, "cpu"), deadline_s)
        link, heard = met.link, met.early
        while not any(isinstance(message, PullRequest) for message in heard):
            heard = control.receive(deadline_s)
        for message in self.say:
            control.send(message)
        self.go.wait()
        self._send_late(link)
        link.close()
        control.close()
        self.waker.close()

    def _send_late(self, link: NcclGroupLink) -> None:
        """The announced chunk, whether or not it is still expected."""
        chunks = [message for message in self.say if isinstance(message, Chunk)]
        if not chunks:
            return
        data = torch.full(((chunks[0].stop - chunks[0].start) * BLOCK_BYTES,), 77, dtype=torch.uint8)
        try:
            link.finish(link.send(data, tag(0)))
        except TransferError as error:
            self.late = error.message


@pytest.fixture
def impostor() -> Iterator[Callable[..., Impostor]]:
    made: list[Impostor] = []

    def make(*say: Message) -> Impostor:
        made.append(Impostor(list(say)))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def expecting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once an announced chunk is expected."""
    found = threading.Event()

    def spy(chunks: int) -> int:
        found.set()
        return tag(chunks)

    monkeypatch.setattr(receiving, "tag", spy)
    return found


@pytest.mark.parametrize("targets", [[4, 5, 6], [4, 6, 8]], ids=["direct", "staged"])
def test_a_chunk_that_comes_after_its_pull_timed_out_is_written_nowhere(
    agent: Callable[[], LocalPeer],
    impostor: Callable[..., Impostor],
    expecting: threading.Event,
    targets: list[int],
) -> None:
    target = agent()
    stuck = impostor(Opening(0, 0, 3, b""), Chunk(0, 0, 3))
    target.pull("stuck", stuck.offer(3), 0, targets, 5.0)
    assert expecting.wait(PATIENCE_S)
    assert target.poll() == []
    target.advance(5.0)
    assert failure(target).reason == "timeout"
    for block in range(64):
        target.write(block, 2)
    before = [target.read(block) for block in range(64)]
    stuck.end()
    healthy = agent()
    target.pull("p", healthy.offer("l", 1, [1], 60.0), 0, [60], 60.0)
    assert isinstance(events(target)[0], PullSucceeded)
    assert [target.read(block) for block in range(60)] == before[:60]


def test_another_pull_of_a_peer_that_is_cut_off_fails_too(
    agent: Callable[[], LocalPeer], impostor: Callable[..., Impostor], expecting: threading.Event
) -> None:
    target = agent()
    stuck = impostor(Opening(0, 0, 3, b""), Chunk(0, 0, 3))
    target.pull("stuck", stuck.offer(3), 0, [4, 5, 6], 5.0)
    assert expecting.wait(PATIENCE_S)
    target.pull("other", stuck.offer(3), 0, [14, 15, 16], 60.0)
    target.advance(5.0)
    ended = {event.pull_id: event.reason for event in events(target, 2) if isinstance(event, PullFailed)}
    assert ended == {"stuck": "timeout", "other": "io"}


@pytest.mark.parametrize(
    "say",
    [
        [Chunk(0, 0, 3)],
        [Chunk(7, 0, 3)],
        [Opening(0, 0, 4, b"")],
        [Opening(0, 1, 2, b"")],
        [Opening(0, 0, 0, b"")],
        [Opening(0, 0, 3, bytes(16))],
        [Opening(0, 0, 3, b""), Chunk(0, 3, 6)],
        [Opening(0, 0, 3, b""), Chunk(0, 0, 10)],
        [Opening(0, 0, 3, b""), Chunk(0, 0, 0)],
        [End(0, "", "")],
        [End(7, "", "")],
        [Confirm(0)],
    ],
    ids=repr,
)
def test_a_peer_that_breaks_the_protocol_fails_its_pulls(
    agent: Callable[[], LocalPeer], impostor: Callable[..., Impostor], say: list[Message]
) -> None:
    target = agent()
    target.pull("p", impostor(*say).offer(3), 0, [4, 5, 6], 60.0)
    assert failure(target).reason == "io"


@pytest.mark.parametrize(
    "message",
    [End(0, "", ""), PullRequest(0, "l", 1, 0, 1, 0, 1, 0, 1, b""), StorePut("key", b"value")],
    ids=repr,
)
def test_a_puller_that_breaks_the_protocol_harms_no_other(
    agent: Callable[[], LocalPeer], message: Message
) -> None:
    source, target = agent(), agent()
    source.write(1, 1)
    offer = source.offer("l", 1, [1], 60.0)
    packed, key = opened_one(offer.endpoint)
    waker = Waker()
    rude = Control(socket.create_connection((HOST, decode(packed).port)), waker, time.monotonic)
    met = rude.enter(LeaseClaim("l", 1, key), time.monotonic() + PATIENCE_S)
    if isinstance(message, PullRequest):
        message = structs.replace(message, proof=request_proof(key, met.nonces, message.number))
    for _ in range(3):
        rude.send(message)
    target.pull("p", offer, 0, [1], 60.0)
    assert isinstance(events(target)[0], PullSucceeded)
    assert target.read(1) == source.read(1)
    rude.close()
    waker.close()


def test_a_pull_before_anything_is_registered_is_refused() -> None:
    peer: Any = NcclTransfer(HOST, time.monotonic)
    with pytest.raises(TransferError, match="registered"):
        peer.offer("l", 1, [1], 60.0)
    peer.close()


def test_a_block_that_does_not_exist_cannot_be_offered(agent: Callable[[], LocalPeer]) -> None:
    with pytest.raises(TransferError, match="outside"):
        agent().offer("l", 1, [64], 60.0)


@pytest.mark.parametrize(
    "part", [BlockPart(2, 2), BlockPart(-1, 2), BlockPart(0, 0), BlockPart(0, 3)], ids=repr
)
def test_a_pull_of_or_into_a_part_that_there_is_none_of_is_refused(
    agent: Callable[[], LocalPeer], part: BlockPart
) -> None:
    source, target = agent(), agent()
    offer = source.offer("l", 1, [1], 60.0)
    for index, (theirs, mine) in enumerate([(part, UNSHARDED), (UNSHARDED, part), (BlockPart(0, 2), part)]):
        target.pull(f"p{index}", offer, 0, [1], 60.0, theirs, mine)
        assert failure(target).reason == "layout"


def test_an_address_that_cannot_be_bound_is_named() -> None:
    peer = LocalPeer(lambda now: NcclTransfer("192.0.2.1", now))
    with pytest.raises(TransferError, match=r"192\.0\.2\.1"):
        peer.start(BLOCK_BYTES)
