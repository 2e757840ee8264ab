"""Connections that Kvasir makes by itself, to URLs that somebody chose.

A name is resolved once, each of its addresses is judged, and the connection goes to an address that was
judged: a name that answers differently a moment later gains nothing. No redirect is followed, no proxy of the
environment is used, and certificates are verified always.
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
    """As the machine resolves names."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


async def checked_addresses(target: OutboundTarget, *, private: bool, resolve: Resolve) -> list[Address]:
    """Where `target` may be connected to. Raises OutboundRefused where any of its addresses is refused: a
    name that mixes them is no name to trust; and OSError for a name that has none."""
    check_target(target, private=private)
    if target.address is not None:
        return [target.address]
    found: list[Address] = []
    for text in await resolve(target.host, target.port):
        try:
            address = ipaddress.ip_address(text)
        except ValueError as error:
            raise OutboundRefused(f"{target.host} resolves to what is no address") from error
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
    """A connection to `target`, over TLS for https, to the first of its addresses that takes one.

    Raises OutboundRefused, and OSError (ssl.SSLError too) where none can be made. Bound it in time.
    """
    failed: OSError | None = None
    for address in await checked_addresses(target, private=private, resolve=resolve):
        try:
            return await asyncio.open_connection(
                str(address),
                target.port,
                limit=_MAX_LINE,
                ssl=context if target.scheme == "https" else None,
                # The certificate is of the name, though the connection is to the address.
                server_hostname=target.host if target.scheme == "https" else None,
            )
        except OSError as error:
            failed = error
    raise failed or OSError(f"{target.host} has no address")


def client_context(ca_file: str | None) -> ssl.SSLContext:
    """What servers are verified by: `ca_file`, or the system's authorities. Raises OSError."""
    context = ssl.create_default_context(cafile=None if ca_file is None else str(Path(ca_file)))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
