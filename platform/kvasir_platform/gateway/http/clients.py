"""Limits the connections of each client address, so that one address cannot exhaust the shared limit.

An IPv6 host usually has a /64 network, so the client is the network.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

_V6_PREFIX = 8


class ClientConnections:
    """Counts connections by client, never more entries than connections. Those in `trusted` networks stand
    for many clients and are not counted."""

    def __init__(self, limit: int, trusted: Sequence[str]) -> None:
        self._limit = limit
        self._trusted = [ipaddress.ip_network(network) for network in trusted]
        self._counts: dict[bytes, int] = {}

    def enter(self, peer: object) -> tuple[bytes | None, bool]:
        """Count a connection of `peer`, a socket's peer name. Returns the client to `leave` with (None: not
        counted) and whether it is within its limit."""
        client = self._client(peer)
        if client is None:
            return None, True
        count = self._counts.get(client, 0) + 1
        self._counts[client] = count
        return client, count <= self._limit

    def leave(self, client: bytes | None) -> None:
        """Uncount a connection."""
        if client is None:
            return
        count = self._counts[client] - 1
        if count:
            self._counts[client] = count
        else:
            del self._counts[client]

    def __len__(self) -> int:
        return len(self._counts)

    def _client(self, peer: object) -> bytes | None:
        address = _address(peer)
        if address is None:
            return None
        if any(address in network for network in self._trusted):
            return None
        return address.packed if address.version == 4 else address.packed[:_V6_PREFIX]


def is_loopback(peer: object) -> bool:
    """Return whether `peer`, a socket's peer name, is on this machine."""
    address = _address(peer)
    return address is not None and address.is_loopback


def _address(peer: object) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address of a peer; None for a Unix socket, which somebody opened for others."""
    if not isinstance(peer, tuple) or not peer:
        return None
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address
