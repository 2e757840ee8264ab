"""What ended requests and workers have cost, kept by one router or shared by several.

A router never writes how a worker's time is divided. It adds what its requests claim of the workers' time
and states how long it saw each worker; the division is made when records are read, over all routers and the
whole hour, so that its parts always add up to the time of the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

HOUR_S = 3600
DAY_S = 24 * HOUR_S


class CostGroup(NamedTuple):
    """Requests whose claims are added up. `hour` is the begin of an hour in Unix seconds; `key` identifies an
    API key, "" without one."""

    hour: int
    pool: str
    tenant: str
    key: str
    model: str
    slo: str


class WorkSums(NamedTuple):
    """Requests, tokens and claims of a group. Claims are seconds of a worker: `prefill` of prompt tokens that
    were computed, `decode` of steps, `kv` of memory held, `transfer` of memory held while KV moves; `wasted`
    is all work that no client is charged for. Tokens and requests are counted for the pool that generates."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    output_tokens: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    kv: float = 0.0
    transfer: float = 0.0
    wasted: float = 0.0

    def plus(self, other: WorkSums) -> WorkSums:
        """Return the sums of both."""
        return WorkSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def claims(self) -> float:
        """All claims of the group, in seconds of a worker."""
        return self.prefill + self.decode + self.kv + self.transfer + self.wasted


class WorkerHour(NamedTuple):
    """One worker in one hour, as one router saw it: from `first_s` to `last_s`, in seconds of the hour, of
    which it ran this router's requests for `busy_s`. It has `gpus` GPUs, 0 for a worker without, and costs
    `price` an hour."""

    hour: int
    pool: str
    worker: str
    router: str
    first_s: float
    last_s: float
    busy_s: float
    gpus: float
    price: float


@dataclass(frozen=True, slots=True)
class CostBatch:
    """What a router has to write: claims to add, and the present state of its worker hours. `number` grows
    with each batch of `writer`."""

    writer: str
    number: int
    work: Mapping[CostGroup, WorkSums]
    workers: Sequence[WorkerHour]


@dataclass(frozen=True, slots=True)
class CostRecords:
    """What all routers have written of some hours."""

    work: Mapping[CostGroup, WorkSums]
    workers: Sequence[WorkerHour]


class CostStore(Protocol):
    """Obligations: a batch is added as a whole, and once, however often it is sent; a worker hour replaces
    the one of the same hour, worker and router. What is older than the retention is forgotten. Methods raise
    UpstreamError if the store cannot be reached."""

    async def add(self, batch: CostBatch) -> None:
        """Add a batch, unless this writer has already added one with its number or a later one."""
        ...

    async def read(self, since: int, until: int) -> CostRecords:
        """Return the records of hours from `since` to before `until`, in Unix seconds."""
        ...

    async def forget(self, before: int) -> None:
        """Forget all hours before `before`, in Unix seconds."""
        ...

    async def close(self) -> None:
        """Release what the store holds."""
        ...
