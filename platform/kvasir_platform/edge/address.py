"""One address for several processes: the core holds it, each edge listens on it, and the kernel spreads
connections over those that listen.

A socket that is bound and does not listen is given no connections, so that the core can keep the address
while edges come and go, also one that the kernel chose (port 0).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

_BACKLOG = 1024


async def resolve(host: str, port: int) -> list[tuple[str, int]]:
    """Every address that `host` stands for. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return [(str(address[0]), int(address[1])) for *_, address in dict.fromkeys(found)]


def hold(addresses: list[tuple[str, int]]) -> list[socket.socket]:
    """Sockets that hold the addresses, all with one port where it is 0. Raises OSError when somebody else has
    one of them."""
    held: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        port = 0
        for host, wanted in addresses:
            sock = stack.enter_context(_alone(host, wanted or port))
            held.append(sock)
            port = int(sock.getsockname()[1])
        stack.pop_all()
    return held


def shared(host: str, port: int, *, reuse: bool = True) -> socket.socket:
    """A socket bound to an address that other processes of this user may have in the same way. `reuse`: also
    where connections of the past linger. Raises OSError."""
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def _alone(host: str, port: int) -> socket.socket:
    """A shared socket that nobody shares yet."""
    # Whoever listens with the same permission would be shared with: so ask for the address alone first.
    with socket.create_server((host, port), family=_family(host), backlog=1):
        pass
    try:
        # Without `reuse` nobody can take the address while no edge listens.
        return shared(host, port, reuse=False)
    except OSError:
        return shared(host, port)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
