"""Rollouts that several routers share in Redis, in the server and namespace of their rate limits.

One hash per route: `version`, `run`, `state`, and a field for each count. Each call is one script, so that a
count is added once, and one of several concurrent changes wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvasir.config.spec.redis import LimitsRedisSpec
from kvasir.ports.traffic.rollouts import StoredRollout
from kvasir_platform.gateway.tenants.redis_connection import RedisCaller

_CONNECT_S: Final = 2.0
_KEPT_S: Final = 90 * 86_400
"""How long a rollout outlives its last router."""

_ADD: Final = """
local run = redis.call('HGET', KEYS[1], 'run') or '0'
if run == ARGV[1] then
  for i = 3, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], 'count:' .. ARGV[i], ARGV[i + 1]) end
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return redis.call('HGETALL', KEYS[1])
"""
_REPLACE: Final = """
if (redis.call('HGET', KEYS[1], 'version') or '0') ~= ARGV[1] then return 0 end
if (redis.call('HGET', KEYS[1], 'run') or '0') ~= ARGV[3] then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'run', ARGV[3], 'state', ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return 1
"""
_COUNT = b"count:"


class RedisRollouts:
    """`kvasir.ports.traffic.rollouts.RolloutStore` in Redis, over one connection that is made again when it
    fails."""

    shared = True

    def __init__(self, spec: LimitsRedisSpec) -> None:
        self._spec = spec
        self._link = RedisCaller(
            spec,
            answer_s=spec.timeout_s,
            connect_s=_CONNECT_S,
            what="rollouts",
            code="rollouts_unavailable",
        )

    async def add(self, route: str, run: int, counts: Mapping[str, int]) -> StoredRollout:
        """See RolloutStore."""
        pairs = [part for item in counts.items() for part in item]
        command = ("EVAL", _ADD, 1, self._key(route), run, _KEPT_S, *pairs)
        (found,) = await self._link.ask([command])
        fields = dict(zip(found[::2], found[1::2], strict=True))
        return StoredRollout(
            int(fields.get(b"version", 0)),
            int(fields.get(b"run", 0)),
            fields.get(b"state", b""),
            {
                name.removeprefix(_COUNT).decode(): int(value)
                for name, value in fields.items()
                if name.startswith(_COUNT)
            },
        )

    async def replace(self, route: str, version: int, run: int, state: bytes) -> bool:
        """See RolloutStore."""
        key = self._key(route)
        command = ("EVAL", _REPLACE, 1, key, version, version + 1, run, state, _KEPT_S)
        (done,) = await self._link.ask([command])
        return bool(done)

    async def close(self) -> None:
        """See RolloutStore."""
        await self._link.close()

    def _key(self, route: str) -> str:
        return f"{self._spec.namespace}:rollout:{route}"
