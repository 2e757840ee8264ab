"""A real HAProxy in front of a gateway, with one keep-alive connection to it that all clients share.

In this arrangement request smuggling is visible: if the two parse a request differently, another client
receives the answer.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.kit.programs import program

_CONFIG = """\
global
    maxconn 256
    nbthread 1
defaults
    mode http
    timeout connect 2s
    timeout client 1s
    timeout http-request 500ms
    timeout http-keep-alive 200ms
    timeout server 3s
    timeout queue 5s
    option http-keep-alive
    http-reuse always
frontend clients
    bind fd@{fd}
    default_backend gateway
backend gateway
    server only {host}:{port} maxconn 1
"""


@asynccontextmanager
async def haproxy(host: str, port: int, folder: Path) -> AsyncIterator[tuple[str, int]]:
    """Run HAProxy in front of `host:port` with its configuration in `folder`; return the address to call."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = folder / "haproxy.cfg"
        config.write_text(_CONFIG.format(fd=listener.fileno(), host=host, port=port))
        process = await asyncio.create_subprocess_exec(
            program("haproxy"),
            "-db",
            "-q",
            "-f",
            str(config),
            pass_fds=[listener.fileno()],
            stderr=asyncio.subprocess.DEVNULL,
        )
        address = listener.getsockname()
    try:
        yield str(address[0]), int(address[1])
        if process.returncode is not None:
            raise RuntimeError(f"haproxy ended with status {process.returncode}")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
