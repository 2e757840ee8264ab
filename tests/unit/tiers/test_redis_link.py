"""A connection to a server ends every wait at its deadline, and never mixes up responses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvasir.config.spec.tiers import RedisTierSpec
from kvasir_workers.tiers.blobs.redis_link import (
    LinkError,
    RedisConnection,
    RedisLink,
    RedisRefusal,
    command,
    set_command,
)


@dataclass
class Peer:
    """A server whose every answer the test gives, and a clock that it turns."""

    listener: socket.socket
    now: float = 100.0

    def link(self, connections: int = 2) -> RedisLink:
        host, port = self.listener.getsockname()
        spec = RedisTierSpec(url=f"redis://{host}:{port}", connections=connections)
        return RedisLink(spec, lambda: self.now)

    def accept(self) -> socket.socket:
        return self.listener.accept()[0]


@pytest.fixture
def peer() -> Iterator[Peer]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20.0)
        yield Peer(listener)


@pytest.fixture
def line(peer: Peer) -> Iterator[tuple[RedisConnection, socket.socket]]:
    link = peer.link()
    (made,) = link.take(1, peer.now + 20.0)
    with peer.accept() as other:
        yield made, other
    link.hang_up()


def test_answers_come_in_the_order_of_the_questions(line: tuple[RedisConnection, socket.socket]) -> None:
    ours, theirs = line
    ours.send([command(b"GET", b"key"), command(b"PING")])
    assert theirs.recv(1000) == b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n*1\r\n$4\r\nPING\r\n"
    theirs.sendall(b"$3\r\nabc\r\n+PONG\r\n:7\r\n$-1\r\n-OOM command not allowed\r\n-ERR what\r\n")
    assert [ours.receive() for _ in range(4)] == [b"abc", b"PONG", 7, None]
    assert ours.receive() == RedisRefusal("OOM", "command not allowed")
    assert ours.receive() == RedisRefusal("ERR", "what")


def test_a_value_of_two_pieces_is_sent_as_one(line: tuple[RedisConnection, socket.socket]) -> None:
    ours, theirs = line
    ours.send(set_command(b"key", b"head", memoryview(b"body"), 60))
    assert theirs.recv(1000) == command(b"SET", b"key", b"headbody", b"EX", b"60")


def test_an_answer_that_is_there_is_taken_shortly_after_the_deadline_and_not_later(
    peer: Peer, line: tuple[RedisConnection, socket.socket]
) -> None:
    ours, theirs = line
    theirs.sendall(b":1\r\n")
    peer.now += 20.001
    assert ours.receive() == 1
    theirs.sendall(b":2\r\n")
    peer.now += 20.0
    with pytest.raises(LinkError) as raised:
        ours.receive()
    assert raised.value.timed_out


def test_nothing_is_waited_for_past_the_deadline(
    peer: Peer, line: tuple[RedisConnection, socket.socket]
) -> None:
    ours, theirs = line
    peer.now += 20.001
    late = threading.Timer(0.5, theirs.sendall, [b":1\r\n"])
    late.start()
    with pytest.raises(LinkError) as raised:
        ours.receive()
    late.cancel()
    late.join()
    assert raised.value.timed_out


def test_a_peer_that_does_not_read_ends_a_write_at_the_deadline(
    peer: Peer, line: tuple[RedisConnection, socket.socket]
) -> None:
    ours, _ = line
    ours.until(peer.now + 0.05)
    with pytest.raises(LinkError) as raised:
        ours.send([memoryview(bytes(64 << 20))])
    assert raised.value.timed_out


@pytest.mark.parametrize("how", ["an answer that nobody asked for", "the end"])
def test_a_line_that_is_not_clean_is_not_used_again(peer: Peer, how: str) -> None:
    link = peer.link(connections=1)
    (first,) = link.take(1, peer.now + 20.0)
    with peer.accept() as other:
        other.sendall(b":1\r\n") if how != "the end" else other.shutdown(socket.SHUT_WR)
        (second,) = link.take(1, peer.now + 20.0)
        assert second is not first
        with peer.accept() as another:
            another.sendall(b":2\r\n")
            assert second.receive() == 2
    link.hang_up()


def test_lines_are_opened_as_they_are_wanted_and_never_more_than_allowed(peer: Peer) -> None:
    link = peer.link(connections=2)
    assert len(link.take(1, peer.now + 20.0)) == 1
    assert len(link.take(5, peer.now + 20.0)) == 2
    assert len(link.take(1, peer.now + 20.0)) == 2
    link.hang_up()
    assert len(link.take(1, peer.now + 20.0)) == 1
    link.hang_up()
