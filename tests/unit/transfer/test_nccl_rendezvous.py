"""A link for host memory: how two sides connect and part, and what moves over it."""

from __future__ import annotations

import ctypes
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import KvRegion
from kvasir_workers.transfer.common.checksums import HostSums
from kvasir_workers.transfer.common.memory import HostPieces
from kvasir_workers.transfer.nccl.group import PULLER, Fabric
from kvasir_workers.transfer.nccl.sockets import SERVER, SocketLink

HOST = "127.0.0.1"
PATIENCE_S = 20.0


class Told:
    """A relay whose other side says one thing, or nothing."""

    def __init__(self, *said: tuple[str, bytes]) -> None:
        self.said = list(said)

    def put(self, key: str, value: bytes) -> None:
        """See StoreRelay."""

    def next(self) -> tuple[str, bytes]:
        """See StoreRelay."""
        return self.said.pop()

    def await_connection(self, listener: socket.socket) -> None:
        """See StoreRelay."""


class Passed:
    """A relay between two threads."""

    def __init__(self) -> None:
        self.keys: queue.Queue[tuple[str, bytes]] = queue.Queue()

    def put(self, key: str, value: bytes) -> None:
        """See StoreRelay."""
        self.keys.put((key, value))

    def next(self) -> tuple[str, bytes]:
        """See StoreRelay."""
        return self.keys.get(timeout=PATIENCE_S)

    def await_connection(self, listener: socket.socket) -> None:
        """See StoreRelay."""
        select.select([listener], [], [], PATIENCE_S)


@pytest.fixture
def links() -> Iterator[tuple[SocketLink, SocketLink]]:
    """The server's and the puller's."""
    relay, found = Passed(), []
    serving = threading.Thread(target=lambda: found.append(Fabric(HOST, "cpu").link(SERVER, relay)))
    serving.start()
    pulling = Fabric(HOST, "cpu").link(PULLER, relay)
    serving.join()
    (server,) = found
    assert isinstance(server, SocketLink)
    assert isinstance(pulling, SocketLink)
    yield server, pulling
    server.close()
    pulling.close()


def beside(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_a_connection_that_does_not_come_is_an_error() -> None:
    with pytest.raises(TransferError, match="cannot connect"):
        Fabric(HOST, "cpu").link(SERVER, Told())


def test_a_side_that_left_is_not_there_to_connect_to() -> None:
    with socket.create_server((HOST, 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(TransferError, match="cannot connect"):
        Fabric(HOST, "cpu").link(PULLER, Told(("address", f"{HOST} {port}".encode())))


@pytest.mark.parametrize(
    "said",
    [
        ("0/0", b"127.0.0.1 80"),
        ("address", b""),
        ("address", b"127.0.0.1 x"),
        ("address", b"127.0.0.1 99999999"),
        ("address", b"\0 80"),
        ("address", b"a" * 70 + b" 80"),
    ],
)
def test_what_names_no_address_is_refused(said: tuple[str, bytes]) -> None:
    with pytest.raises(TransferError, match=r"did not name|cannot connect"):
        Fabric(HOST, "cpu").link(PULLER, Told(said))


def pieces(memory: bytearray, size: int, rows: int = 1) -> HostPieces:
    """The memory, cut into pieces of a size."""
    start = address(memory)
    at = np.arange(start, start + len(memory), size, dtype=np.uint64)
    lengths = np.minimum(np.uint64(start + len(memory)) - at, np.uint64(size))
    return HostPieces(at, lengths, rows)


def address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_many_pieces_arrive_in_their_order_whatever_their_sizes(links: tuple[SocketLink, SocketLink]) -> None:
    server, puller = links
    sent = bytearray(bytes(range(251)) * 40_000)
    mine = bytearray(len(sent))
    # More than the kernel takes in one call, and of other sizes than on the sending side.
    sending = beside(lambda: server.send(pieces(sent, 3001), 1))
    puller.finish(puller.receive(pieces(mine, 4999), 1))
    sending.join()
    assert mine == sent


def test_what_is_received_is_summed(links: tuple[SocketLink, SocketLink]) -> None:
    server, puller = links
    sent = bytearray(bytes(range(250)) * 64)
    mine = bytearray(len(sent))
    work = pieces(mine, 1000, rows=4)
    work.parts = 2
    server.send(pieces(sent, 777), 1)
    puller.finish(puller.receive(work, 1))
    sums = HostSums([KvRegion(address(sent) + region * 4000, 1000, 4) for region in range(4)])
    assert work.sums is not None
    assert np.array_equal(work.sums, sums.begin(range(4), 2).result())
    sums.close()


def test_a_tensor_moves_as_well(links: tuple[SocketLink, SocketLink]) -> None:
    server, puller = links
    found = torch.zeros(5, dtype=torch.uint8)
    server.send(torch.arange(5, dtype=torch.uint8), 0)
    puller.finish(puller.receive(found, 0), 5.0)
    assert found.tolist() == [0, 1, 2, 3, 4]


def test_a_side_that_closes_within_a_message_is_an_error(links: tuple[SocketLink, SocketLink]) -> None:
    server, puller = links
    sent, mine = bytearray(b"abc"), bytearray(4)
    server.send(pieces(sent, 3), 1)
    server.close()
    with pytest.raises(TransferError, match="broke"):
        puller.finish(puller.receive(pieces(mine, 4), 1))


@pytest.mark.parametrize("sends", [False, True])
def test_a_wait_ends_when_another_thread_aborts_it(
    links: tuple[SocketLink, SocketLink], *, sends: bool
) -> None:
    server, _ = links
    memory = bytearray(64 << 20)
    much = pieces(memory, 1 << 20)
    failures: list[str] = []

    def wait() -> None:
        try:
            server.finish(server.send(much, 1) if sends else server.receive(much, 1))
        except TransferError as error:
            failures.append(error.message)

    waiting = beside(wait)
    server.abort()
    waiting.join(PATIENCE_S)
    assert len(failures) == 1


def test_a_message_that_does_not_come_ends_the_wait(links: tuple[SocketLink, SocketLink]) -> None:
    _, puller = links
    mine = bytearray(4)
    with pytest.raises(TransferError, match="in time"):
        puller.finish(puller.receive(pieces(mine, 4), 1), 0.01)
