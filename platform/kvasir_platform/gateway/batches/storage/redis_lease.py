"""Leases of batches in Redis, for routers that share no folder.

A lease is a key with the holder's name, which ends by itself unless it is kept. Tokens are counted by the
server, so that a later holder has a larger one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvasir.config.spec.redis import LeaseRedisSpec
from kvasir.core.errors import CapacityError
from kvasir_platform.gateway.tenants.redis_connection import (
    RedisFailure,
    connected,
    deadline,
    exchange,
    where,
)

TTL_S = 15.0
_KEEP_TOKENS_S = 366 * 86_400

#: KEYS: lease, count of tokens. ARGV: holder, TTL in milliseconds. Returns the token, or nothing.
_TAKE = f"""
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return false end
local token = redis.call('INCR', KEYS[2])
redis.call('EXPIRE', KEYS[2], {_KEEP_TOKENS_S})
return token
"""
_KEEP = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 1"


class RedisLease:
    """WorkLease in Redis, with a connection for each call: they are few. `process` names this holder, `now`
    is monotonic, in seconds."""

    def __init__(self, spec: LeaseRedisSpec, process: str, now: Callable[[], float]) -> None:
        self._spec = spec
        self._process = process
        self._now = now
        self._kept_s: dict[str, float] = {}

    def take(self, name: str) -> int | None:
        """See WorkLease."""
        asked_s = self._now()
        token = self._script(_TAKE, name)
        if not token:
            return None
        self._kept_s[name] = asked_s
        return int(token)

    def keep(self, name: str) -> bool:
        """See WorkLease: while the server does not answer, a lease lasts for half of its time."""
        asked_s = self._now()
        try:
            held = bool(self._script(_KEEP, name))
        except CapacityError:
            return asked_s - self._kept_s.get(name, -TTL_S) < TTL_S / 2
        if held:
            self._kept_s[name] = asked_s
        return held

    def release(self, name: str, *, done: bool) -> None:
        """See WorkLease."""
        self._kept_s.pop(name, None)
        self._script(_RELEASE, name)

    def _script(self, script: str, name: str) -> Any:
        lease = f"{self._spec.namespace}:batch:{name}"
        command = ("EVAL", script, 2, lease, f"{lease}:token", self._process, int(TTL_S * 1e3))
        try:
            return asyncio.run(self._asked(command))
        except (RedisFailure, OSError) as error:
            raise CapacityError(
                f"The Redis of gateway.batches.redis at {where(self._spec)} fails: {type(error).__name__}.",
                code="storage_unavailable",
            ) from error

    async def _asked(self, command: tuple[Any, ...]) -> Any:
        spec = self._spec
        async with connected(spec, spec.timeout_s) as connection, deadline(spec.timeout_s):
            (answer,) = await exchange(connection, [command])
            return answer
