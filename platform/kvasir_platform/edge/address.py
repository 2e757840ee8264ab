"""One address for several processes: the core binds it, each edge listens on it, and the kernel distributes
connections among those that listen.

A socket that is bound and does not listen receives no connections, so the core keeps the address, including
one that the kernel chose (port 0), while edges start and end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

_BACKLOG = 1024


async def resolve(host: str, port: int) -> list[tuple[str, int]]:
    """Return every address of `host`. Raise OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return [(str(address[0]), int(address[1])) for *_, address in dict.fromkeys(found)]


def hold(addresses: list[tuple[str, int]]) -> list[socket.socket]:
    """Return sockets bound to the addresses, all with one port if it is 0. Raise OSError if an address is in
    use."""
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
    """Return a socket bound to an address that other processes of this user may bind too. `reuse`: also while
    old connections are in TIME_WAIT. Raise OSError."""
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
    """Return a shared socket that no other process has bound."""
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
