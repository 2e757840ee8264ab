"""Outbound connections to configured URLs, protected against server-side request forgery.

A name is resolved once, each of its addresses is checked, and the connection goes to a checked address, so
that DNS rebinding has no effect. Redirects are not followed, proxies of the environment are ignored, and
certificates are always verified.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvasir.config.checks.outbound import (
    Address,
    OutboundRefused,
    OutboundTarget,
    check_address,
    check_target,
)

MAX_ADDRESSES = 16
_MAX_LINE = 64 << 10

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""All addresses of a name, as text; raises OSError."""
Open = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def system_resolve(host: str, port: int) -> list[str]:
    """Resolve a name with the system resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


async def checked_addresses(target: OutboundTarget, *, private: bool, resolve: Resolve) -> list[Address]:
    """Return the addresses of `target`. Raise OutboundRefused if any of them is refused, since a name that
    mixes allowed and refused addresses is not trusted, and OSError if it has none."""
    check_target(target, private=private)
    if target.address is not None:
        return [target.address]
    found: list[Address] = []
    for text in await resolve(target.host, target.port):
        try:
            address = ipaddress.ip_address(text)
        except ValueError as error:
            raise OutboundRefused(f"{target.host} resolves to something that is not an IP address") from error
        check_address(address, private=private)
        if address not in found:
            found.append(address)
    if not found:
        raise OSError(f"{target.host} has no address")
    return found[:MAX_ADDRESSES]


async def connect(
    target: OutboundTarget,
    *,
    private: bool,
    context: ssl.SSLContext | None,
    resolve: Resolve = system_resolve,
) -> Open:
    """Connect to the first address of `target` that accepts, over TLS for https.

    Raise OutboundRefused, or OSError (including ssl.SSLError) if no address accepts. Set a timeout around it.
    """
    failed: OSError | None = None
    for address in await checked_addresses(target, private=private, resolve=resolve):
        try:
            return await asyncio.open_connection(
                str(address),
                target.port,
                limit=_MAX_LINE,
                ssl=context if target.scheme == "https" else None,
                # The certificate names the host, and the connection goes to the address.
                server_hostname=target.host if target.scheme == "https" else None,
            )
        except OSError as error:
            failed = error
    raise failed or OSError(f"{target.host} has no address")


def client_context(ca_file: str | None) -> ssl.SSLContext:
    """Return a context that verifies servers by `ca_file`, or by the system's authorities. Raise OSError."""
    context = ssl.create_default_context(cafile=None if ca_file is None else str(Path(ca_file)))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
