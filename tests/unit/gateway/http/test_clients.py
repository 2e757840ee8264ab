"""Connections are counted per client address or network, and nothing is kept of closed ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_platform.gateway.http.clients import ClientConnections

V6 = ("2001:db8:1:2::1", 1, 0, 0)


def test_a_client_beyond_its_limit_is_unwelcome_until_one_of_its_connections_ends() -> None:
    clients = ClientConnections(2, ())
    entered = [clients.enter(("192.0.2.1", port)) for port in range(3)]
    assert [welcome for _, welcome in entered] == [True, True, False]
    assert clients.enter(("192.0.2.2", 1))[1]
    for client, _ in entered[:2]:
        clients.leave(client)
    assert clients.enter(("192.0.2.1", 9))[1]


@pytest.mark.parametrize(
    ("peer", "same"),
    [
        (("2001:db8:1:2:ffff::9", 5, 0, 0), True),
        (("2001:db8:1:2::1%eth0", 5, 0, 3), True),
        (("2001:db8:1:3::1", 5, 0, 0), False),
    ],
)
def test_an_ipv6_client_is_its_network_of_64_bits(peer: object, same: bool) -> None:
    clients = ClientConnections(1, ())
    clients.enter(V6)
    assert clients.enter(peer)[1] is not same


def test_an_ipv4_client_on_an_ipv6_socket_is_the_same_client() -> None:
    clients = ClientConnections(1, ())
    clients.enter(("192.0.2.1", 5))
    assert not clients.enter(("::ffff:192.0.2.1", 5, 0, 0))[1]


def test_proxies_and_local_sockets_stand_for_many_clients() -> None:
    clients = ClientConnections(1, ("10.0.0.0/8", "2001:db8:1::/48"))
    for peer in (("10.1.2.3", 5), ("::ffff:10.1.2.3", 5, 0, 0), V6, "", b"", None):
        assert [clients.enter(peer) for _ in range(3)] == [(None, True)] * 3
    assert len(clients) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans())))
def test_never_more_is_kept_than_there_are_connections(steps: list[tuple[int, bool]]) -> None:
    clients = ClientConnections(2, ())
    held: list[bytes | None] = []
    for host, enters in steps:
        if enters or not held:
            held.append(clients.enter((f"192.0.2.{host}", 1))[0])
        else:
            clients.leave(held.pop())
        assert len(clients) == len(set(held))
