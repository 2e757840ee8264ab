"""Divides the time of workers among the requests that ran on them: a statement of lines that add up to it.

In each hour and pool, the time in which workers were busy is divided in proportion to the claims of the
requests; the rest is idle. The lines of a statement therefore add up to the time of the workers, whatever
rates the claims were made with, and however many routers wrote them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Literal, NamedTuple

from kvasir.ports.stores.costs import CostGroup, CostRecords, WorkerHour, WorkSums

LineKind = Literal["usage", "wasted", "idle"]
DIMENSIONS = ("day", "tenant", "key", "model", "slo", "pool", "hour")
"""By what lines can be told apart. Idle lines have a day, an hour and a pool only."""

_PoolHour = tuple[int, str]


class PoolTime(NamedTuple):
    """The time of a pool's workers in one hour: of GPUs, or of workers without. Both have a price."""

    device_s: float = 0.0
    busy_s: float = 0.0
    cost: float = 0.0
    busy_cost: float = 0.0
    gpu_s: float = 0.0

    def plus(self, other: PoolTime) -> PoolTime:
        """Return the sums of both."""
        return PoolTime(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(slots=True)
class StatementLine:
    """One line. `names` are its dimensions. `seconds` are of a GPU, or of a worker without GPUs; those of
    phases add up to it in a line of kind `usage`."""

    kind: LineKind
    names: dict[str, str]
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    kv_s: float = 0.0
    transfer_s: float = 0.0
    seconds: float = 0.0
    cost: float = 0.0

    def count(self, sums: WorkSums, scale: float) -> None:
        """Add the requests and phases of a group whose claims are scaled by `scale`."""
        self.requests += round(sums.requests)
        self.prompt_tokens += round(sums.prompt_tokens)
        self.cached_tokens += round(sums.cached_tokens)
        self.output_tokens += round(sums.output_tokens)
        self.prefill_s += sums.prefill * scale
        self.decode_s += sums.decode * scale
        self.kv_s += sums.kv * scale
        self.transfer_s += sums.transfer * scale


@dataclass(frozen=True, slots=True)
class CostStatement:
    """The lines of usage by cost, then wasted and idle ones. `gpu_s` and `device_s` are the time of all
    workers, the former of GPUs only."""

    lines: Sequence[StatementLine]
    device_s: float
    gpu_s: float
    cost: float


def statement(records: CostRecords, by: Sequence[str]) -> CostStatement:
    """Return the statement of some hours, with one line for each combination of the dimensions `by`."""
    pools = pool_times(records.workers)
    claims = _claims(records.work)
    lines: dict[tuple[LineKind, tuple[str, ...]], StatementLine] = {}

    def line(kind: LineKind, hour: int, pool: str, group: CostGroup | None) -> StatementLine:
        names = {name: _named(name, hour, pool, group) for name in by}
        found = (kind, tuple(names.values()))
        if found not in lines:
            lines[found] = StatementLine(kind, names)
        return lines[found]

    for group, sums in records.work.items():
        at = (group.hour, group.pool)
        time = pools.get(at, PoolTime())
        scale, price = _over(time.busy_s, claims[at]), _over(time.busy_cost, claims[at])
        if sums.claims > sums.wasted or sums.requests:
            used = line("usage", group.hour, group.pool, group)
            used.count(sums, scale)
            used.seconds += (sums.claims - sums.wasted) * scale
            used.cost += (sums.claims - sums.wasted) * price
        if sums.wasted:
            wasted = line("wasted", group.hour, group.pool, group)
            wasted.seconds += sums.wasted * scale
            wasted.cost += sums.wasted * price
    for (hour, pool), time in pools.items():
        claimed = claims.get((hour, pool), 0.0) > 0
        idle = line("idle", hour, pool, None)
        idle.seconds += time.device_s - time.busy_s if claimed else time.device_s
        idle.cost += time.cost - time.busy_cost if claimed else time.cost
    kinds = ("usage", "wasted", "idle")
    shown = sorted(lines.values(), key=lambda each: (kinds.index(each.kind), -each.cost, -each.seconds))
    total = PoolTime()
    for time in pools.values():
        total = total.plus(time)
    return CostStatement(shown, total.device_s, total.gpu_s, total.cost)


def spent_by_hour(records: CostRecords) -> dict[int, dict[str, float]]:
    """Return what each tenant was charged, by hour."""
    pools, claims = pool_times(records.workers), _claims(records.work)
    spent: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for group, sums in records.work.items():
        at = (group.hour, group.pool)
        price = _over(pools.get(at, PoolTime()).busy_cost, claims[at])
        spent[group.hour][group.tenant] += (sums.claims - sums.wasted) * price
    return spent


def pool_times(workers: Iterable[WorkerHour]) -> dict[_PoolHour, PoolTime]:
    """Return the time of each pool by hour."""
    seen: dict[tuple[int, str, str], list[WorkerHour]] = defaultdict(list)
    for each in workers:
        seen[each.hour, each.pool, each.worker].append(each)
    times: dict[_PoolHour, PoolTime] = defaultdict(PoolTime)
    for (hour, pool, _), rows in seen.items():
        present_s, busy_s = worker_time(rows)
        last = max(rows, key=lambda row: row.last_s)
        devices, price = last.gpus or 1.0, last.price / 3600
        times[hour, pool] = times[hour, pool].plus(
            PoolTime(
                present_s * devices,
                busy_s * devices,
                present_s * price,
                busy_s * price,
                present_s * last.gpus,
            )
        )
    return times


def worker_time(rows: Sequence[WorkerHour]) -> tuple[float, float]:
    """Return for how long there was a worker in an hour, and for how long it was busy, as its routers saw it.
    Where several saw it at a time, each knows its own requests only: their busy times are taken as
    independent of each other."""
    edges = sorted({edge for row in rows for edge in (row.first_s, row.last_s)})
    present_s = busy_s = 0.0
    for begin_s, end_s in pairwise(edges):
        watching = [row for row in rows if row.first_s <= begin_s and row.last_s >= end_s]
        if not watching:
            continue
        idle = 1.0
        for row in watching:
            idle *= 1.0 - min(1.0, row.busy_s / (row.last_s - row.first_s))
        present_s += end_s - begin_s
        busy_s += (end_s - begin_s) * (1.0 - idle)
    return present_s, busy_s


def _claims(work: Mapping[CostGroup, WorkSums]) -> dict[_PoolHour, float]:
    claims: dict[_PoolHour, float] = defaultdict(float)
    for group, sums in work.items():
        claims[group.hour, group.pool] += sums.claims
    return claims


def _named(name: str, hour: int, pool: str, group: CostGroup | None) -> str:
    if name == "day":
        return datetime.fromtimestamp(hour, UTC).strftime("%Y-%m-%d")
    if name == "hour":
        return datetime.fromtimestamp(hour, UTC).strftime("%Y-%m-%dT%H:00Z")
    if name == "pool":
        return pool
    return "" if group is None else str(getattr(group, name))


def _over(time: float, claims: float) -> float:
    return time / claims if claims > 0 else 0.0
