"""Connections to a Redis server of the spec, with a deadline for every wait: the only module of the platform
that imports its client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio.connection import Connection as RedisConnection
from redis.asyncio.connection import SSLConnection
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError as RedisFailure
from redis.retry import Retry

from kvasir.config.spec.redis import RedisServerSpec
from kvasir.core.errors import UpstreamError

__all__ = [
    "RedisCaller",
    "RedisCommand",
    "RedisConnection",
    "RedisFailure",
    "connected",
    "deadline",
    "exchange",
    "where",
]

RedisCommand = tuple[Any, ...]

_GRACE_S = 0.005
"""After its deadline a batch still takes responses that have arrived already: the loop may have been late
itself."""


@contextlib.asynccontextmanager
async def connected(spec: RedisServerSpec, within_s: float) -> AsyncIterator[RedisConnection]:
    """Connect and log in within that many seconds; disconnect with the context. Raises RedisFailure, and
    OSError if the password cannot be read."""
    connection = _connection(spec)
    try:
        async with deadline(within_s):
            await connection.connect()  # type: ignore[no-untyped-call]
        yield connection
    finally:
        await connection.disconnect(nowait=True)


@contextlib.asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[None]:
    """End what the context waits for after `seconds`. Raises RedisFailure then."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as scope:
            timer = loop.call_later(seconds, lambda: scope.reschedule(loop.time() + _GRACE_S))
            try:
                yield
            finally:
                timer.cancel()
    except TimeoutError:
        raise exceptions.TimeoutError(f"no answer within {seconds:g} s") from None


async def exchange(connection: RedisConnection, commands: Sequence[RedisCommand]) -> list[Any]:
    """Send all commands, then read their responses. Raises RedisFailure, including for a refusal by the
    server."""
    await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    return [await connection.read_response() for _ in commands]


class RedisCaller:
    """One connection to a server, made when it is needed and again after a failure; commands of one call at a
    time. They have `answer_s` seconds, or `connect_s` if that is more and they need a connection. `what` and
    `code` are those of errors. Call everything on one event loop."""

    def __init__(
        self, spec: RedisServerSpec, *, answer_s: float, connect_s: float, what: str, code: str
    ) -> None:
        self._spec = spec
        self._answer_s = answer_s
        self._connect_s = max(answer_s, connect_s)
        self._what = what
        self._code = code
        self._connection: RedisConnection | None = None
        self._open = contextlib.AsyncExitStack()
        self._lock = asyncio.Lock()

    async def ask(self, commands: Sequence[RedisCommand]) -> list[Any]:
        """Send commands and return the replies. Raise UpstreamError if the server does not answer in time."""
        async with self._lock:
            within_s = self._connect_s if self._connection is None else self._answer_s
            try:
                async with deadline(within_s):
                    if self._connection is None:
                        opened = connected(self._spec, within_s)
                        self._connection = await self._open.enter_async_context(opened)
                    return await exchange(self._connection, commands)
            except BaseException as error:
                # A late reply must not be taken for that of a later command.
                await self.close()
                if not isinstance(error, RedisFailure | OSError):
                    raise
                reason = str(error) or type(error).__name__
                raise UpstreamError(
                    f"{self._what}: Redis at {where(self._spec)} does not answer: {reason}", code=self._code
                ) from error

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        self._connection = None
        await self._open.aclose()


def where(spec: RedisServerSpec) -> str:
    """Its host and port."""
    url = urlsplit(spec.url)
    return f"{url.hostname}:{url.port or 6379}"


class _Credentials(CredentialProvider):
    """Read for every connection, so that a password can be changed."""

    def __init__(self, spec: RedisServerSpec) -> None:
        self._spec = spec

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        path = self._spec.password_file
        password = Path(path).read_text(encoding="utf-8").strip() if path is not None else ""
        return (password,) if self._spec.username is None else (self._spec.username, password)


def _connection(spec: RedisServerSpec) -> RedisConnection:
    url = urlsplit(spec.url)
    logs_in = spec.username is not None or spec.password_file is not None
    options: dict[str, Any] = {
        "host": url.hostname or "",
        "port": url.port or 6379,
        "db": int(url.path.lstrip("/") or 0),
        "credential_provider": _Credentials(spec) if logs_in else None,
        # `deadline` bounds every wait. With a timeout of its own the client uses asyncio.wait_for, which can
        # lose a cancellation before Python 3.12, so that a stopping gateway would wait for ever.
        "socket_timeout": None,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "driver_info": None,
    }
    if spec.url.startswith("rediss:"):
        return SSLConnection(ssl_ca_certs=spec.ca_file, ssl_check_hostname=True, **options)
    return RedisConnection(**options)
