"""Costs in Redis, for several routers.

There are three hashes for each UTC day: sums by group, worker hours, and the last batch of each writer. A
batch is one script for each day that it has hours of, so that it is added as a whole and once. Hashes expire,
so that nothing is kept for longer than the retention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvasir.config.spec.redis import CostRedisSpec
from kvasir.ports.stores.costs import DAY_S, CostBatch, CostGroup, CostRecords, WorkerHour, WorkSums
from kvasir_platform.gateway.tenants.redis_connection import RedisCaller, RedisCommand

ADD = """
local known = tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or '0')
if known >= tonumber(ARGV[2]) then return 0 end
local groups = tonumber(ARGV[4])
local at = 5
for _ = 1, groups do
  local field, added = ARGV[at], ARGV[at + 1]
  local sums = redis.call('HGET', KEYS[1], field)
  if sums then
    local olds, total = string.gmatch(sums, '%S+'), {}
    for new in string.gmatch(added, '%S+') do
      total[#total + 1] = string.format('%.17g', tonumber(new) + tonumber(olds()))
    end
    added = table.concat(total, ' ')
  end
  redis.call('HSET', KEYS[1], field, added)
  at = at + 2
end
while at < #ARGV do
  redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1])
  at = at + 2
end
redis.call('HSET', KEYS[3], ARGV[1], ARGV[2])
for i = 1, 3 do redis.call('EXPIRE', KEYS[i], ARGV[3]) end
return 1
"""
"""KEYS: sums, worker hours, writers. ARGV: writer, number, seconds to live, number of groups, then a field
and a value for each group and each worker hour."""

_KINDS = ("work", "workers", "writers")
_APART = "\x1f"


class RedisCosts:
    """`kvasir.ports.stores.costs.CostStore` in Redis. Call everything on one event loop."""

    def __init__(self, spec: CostRedisSpec, retention_days: int) -> None:
        self._spec = spec
        self._expire_s = (retention_days + 1) * DAY_S
        within_s = spec.timeout_s
        self._link = RedisCaller(
            spec, answer_s=within_s, connect_s=within_s, what="costs", code="costs_unavailable"
        )

    async def add(self, batch: CostBatch) -> None:
        """See CostStore."""
        await self._link.ask([self._add_command(batch, day) for day in _days_of(batch)])

    async def read(self, since: int, until: int) -> CostRecords:
        """See CostStore."""
        work: dict[CostGroup, WorkSums] = {}
        workers: list[WorkerHour] = []
        for day in range(since // DAY_S * DAY_S, until, DAY_S):
            sums, hours = await self._link.ask([("HGETALL", key) for key in self._keys(day)[:2]])
            for field, value in _pairs(sums):
                hour, *labels = field.split(_APART)
                group = CostGroup(int(hour), *labels)
                if since <= group.hour < until:
                    work[group] = WorkSums(*map(float, value.split()))
            for field, value in _pairs(hours):
                hour, pool, worker, router = field.split(_APART)
                if since <= int(hour) < until:
                    workers.append(WorkerHour(int(hour), pool, worker, router, *map(float, value.split())))
        return CostRecords(work, workers)

    async def forget(self, before: int) -> None:
        """See CostStore. Days expire by themselves; this removes the one that has just become too old."""
        day = before // DAY_S * DAY_S - DAY_S
        await self._link.ask([("UNLINK", *self._keys(day))])

    async def close(self) -> None:
        """See CostStore."""
        await self._link.close()

    def _keys(self, day: int) -> tuple[str, ...]:
        return tuple(f"{self._spec.namespace}:cost:{day // DAY_S}:{kind}" for kind in _KINDS)

    def _add_command(self, batch: CostBatch, day: int) -> RedisCommand:
        work = {group: sums for group, sums in batch.work.items() if group.hour // DAY_S * DAY_S == day}
        fields: list[str] = []
        for group, sums in work.items():
            fields += (_APART.join(map(str, group)), " ".join(map(repr, sums)))
        for each in batch.workers:
            if each.hour // DAY_S * DAY_S == day:
                fields += (_APART.join(map(str, each[:4])), " ".join(map(repr, each[4:])))
        head = (batch.writer, batch.number, self._expire_s, len(work))
        return ("EVAL", ADD, 3, *self._keys(day), *head, *fields)


def _days_of(batch: CostBatch) -> list[int]:
    hours = (*(group.hour for group in batch.work), *(each.hour for each in batch.workers))
    return sorted({hour // DAY_S * DAY_S for hour in hours})


def _pairs(reply: Sequence[bytes]) -> Iterator[tuple[str, str]]:
    """The fields and values of a hash."""
    texts = [each.decode() for each in reply]
    return zip(texts[::2], texts[1::2], strict=True)
