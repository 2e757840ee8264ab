"""One address that the core reserves and edges listen on."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import pytest

from kvasir_platform.edge.address import hold, resolve, shared
from kvasir_platform.edge.edges import edge_count


def test_connections_go_to_those_that_listen_and_never_to_the_holder() -> None:
    with ExitStack() as stack:
        (holder,) = (stack.enter_context(each) for each in hold([("127.0.0.1", 0)]))
        host, port = holder.getsockname()
        assert port
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port), timeout=5)
        edge = stack.enter_context(shared(host, port))
        edge.listen()
        for _ in range(16):
            with socket.create_connection((host, port), timeout=5):
                edge.accept()[0].close()


def test_an_address_where_somebody_listens_is_refused_even_if_they_share_it() -> None:
    with shared("127.0.0.1", 0) as other:
        other.listen()
        with pytest.raises(OSError, match="in use"):
            hold([other.getsockname()])


def test_the_address_is_still_held_while_no_edge_listens() -> None:
    with ExitStack() as stack:
        (holder,) = (stack.enter_context(each) for each in hold([("127.0.0.1", 0)]))
        with pytest.raises(OSError, match="in use"):
            socket.create_server(holder.getsockname())
        with pytest.raises(OSError, match="in use"):
            hold([holder.getsockname()])
        with shared(*holder.getsockname()) as edge:
            edge.listen()


def test_a_name_is_all_its_addresses() -> None:
    found = asyncio.run(resolve("localhost", 80))
    assert ("127.0.0.1", 80) in found


@pytest.mark.parametrize(
    ("wanted", "cpus", "count"),
    [
        (None, 0.5, 0),
        (None, 2.0, 0),
        (None, 3.9, 0),
        (None, 4.0, 3),
        (None, 6.5, 5),
        (None, 64.0, 8),
        (0, 64.0, 0),
        (2, 1.0, 2),
    ],
)
def test_there_are_edges_where_there_are_cpus_for_them(wanted: int | None, cpus: float, count: int) -> None:
    assert edge_count(wanted, cpus) == count
