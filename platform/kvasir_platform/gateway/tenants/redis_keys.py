"""API keys in the Redis that routers share, so that a key that is created or revoked counts in all of them
within seconds, also where files are mounted Secrets that take minutes.

All keys are one hash of lines by the SHA-256 of the key, beside a number that every change raises: routers
ask for that number once a second and read the lines when it has changed. While the server does not answer,
the keys that were read last stay in use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvasir.config.spec.redis import LimitsRedisSpec
from kvasir.config.spec.tenants import DEFAULT_TENANT
from kvasir.core.errors import ConfigError
from kvasir.ports.clock import Clock
from kvasir_platform.gateway.identity.key_files import StoredKey
from kvasir_platform.gateway.identity.keys import MAX_KEYS, KeyEntry, KeyText, key_line, parse_text
from kvasir_platform.gateway.tenants.redis_connection import (
    RedisCommand,
    RedisConnection,
    RedisFailure,
    connected,
    deadline,
    exchange,
    where,
)

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

SOURCE = "gateway.api_keys_redis"
_PAUSE_S = 1.0
_ANSWER_S = 2.0

#: KEYS: the lines, their version. ARGV: the SHA-256, and its line ("" to remove it).
_CHANGE = """
if ARGV[2] == '' then redis.call('HDEL', KEYS[1], ARGV[1])
else redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
return redis.call('INCR', KEYS[2])
"""


class RedisKeySource:
    """The keys in Redis as a router follows them. `run` must run; `read` is whether it has answered once."""

    def __init__(self, spec: LimitsRedisSpec, clock: Clock) -> None:
        self._spec = spec
        self._clock = clock
        self._version: bytes | None = None
        self._text = ""
        self._warned: set[bool] = set()
        self.read = False

    def text(self) -> KeyText:
        """Return the lines that were read last. May be called from another thread."""
        return KeyText(SOURCE, DEFAULT_TENANT, self._text)

    async def run(self) -> None:
        """Follow the keys until cancelled."""
        while True:
            try:
                async with connected(self._spec, _ANSWER_S) as connection:
                    while True:
                        async with deadline(_ANSWER_S):
                            await self._follow(connection)
                        await self._clock.sleep(_PAUSE_S)
            except (RedisFailure, OSError, ConfigError) as error:
                # A server that answers again and has lost its data is another trouble than before.
                if (lost := isinstance(error, ConfigError)) not in self._warned:
                    self._warned.add(lost)
                    _log.error(
                        "API keys in Redis cannot be read; those that were read last stay in use",
                        extra={"redis": where(self._spec), "reason": str(error) or type(error).__name__},
                    )
            await self._clock.sleep(_PAUSE_S)

    async def _follow(self, connection: RedisConnection) -> None:
        lines, version = _names(self._spec)
        (found,) = await exchange(connection, [("GET", version)])
        if found is None and self._version is not None:
            raise ConfigError(
                "the server has lost its data: create the keys anew, in a Redis that keeps them"
            )
        if not self.read or found != self._version:
            text = "\n".join(await _lines(connection, lines))
            if (await exchange(connection, [("GET", version)])) != [found]:
                # Changed meanwhile, or lost: what was read may be a part.
                return
            self._text, self._version, self.read = text, found, True
        self._warned.clear()


class RedisKeyStore:
    """The keys in Redis as `kvasir keys` changes them. Each method makes a connection of its own, outside any
    event loop. Raise ConfigError if the server does not answer."""

    def __init__(self, spec: LimitsRedisSpec) -> None:
        self._spec = spec

    def keys(self) -> list[StoredKey]:
        """Return all keys."""
        lines = self._ask(lambda connection: _lines(connection, _names(self._spec)[0]))
        text = KeyText(SOURCE, DEFAULT_TENANT, "\n".join(lines))
        return [StoredKey(hashed, entry, self._source) for _, hashed, entry in parse_text(text)]

    def add(self, hashed: bytes, entry: KeyEntry) -> str:
        """Store a key, or other metadata of it, and return where."""
        self._change(hashed, key_line(hashed, entry))
        return self._source

    def remove(self, key: StoredKey) -> None:
        """Remove a key."""
        self._change(key.hashed, "")

    def replace(self, key: StoredKey, entry: KeyEntry) -> None:
        """Give a key other metadata."""
        self.add(key.hashed, entry)

    @property
    def _source(self) -> str:
        return f"redis {where(self._spec)}"

    def _change(self, hashed: bytes, line: str) -> None:
        command = ("EVAL", _CHANGE, 2, *_names(self._spec), hashed.hex(), line)
        self._ask(lambda connection: exchange(connection, [command]))

    def _ask(self, ask: Callable[[RedisConnection], Coroutine[Any, Any, _T]]) -> _T:
        async def asked() -> _T:
            async with connected(self._spec, _ANSWER_S) as connection, deadline(_ANSWER_S):
                return await ask(connection)

        try:
            return asyncio.run(asked())
        except (RedisFailure, OSError) as error:
            raise ConfigError(f"tenancy.redis {where(self._spec)}: {error}; nothing was changed") from error


def _names(spec: LimitsRedisSpec) -> tuple[str, str]:
    """Return the names of the lines and of their version."""
    return f"{spec.namespace}:api-keys", f"{spec.namespace}:api-keys:version"


async def _lines(connection: RedisConnection, name: str) -> Sequence[str]:
    (count,) = await exchange(connection, [("HLEN", name)])
    if count > MAX_KEYS:
        raise ConfigError(f"{SOURCE}: more than {MAX_KEYS} API keys")
    command: RedisCommand = ("HVALS", name)
    (found,) = await exchange(connection, [command])
    return [line.decode("utf-8", "replace") for line in sorted(found)]
