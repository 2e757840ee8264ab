"""Workers that embed, and the choice among them: the one with the fewest tokens in flight.

An embedding is one pass over its input, so the tokens on a worker say how long it is busy; there is no
hand-off and no stream to disturb. A worker gets at most two of its batches at once: one runs and one is
ready. Other inputs wait in the router, where they can go to the first free worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from kvasir.config.spec.deployment import HealthSpec
from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvStatus
from kvasir.core.requests import EngineLoad, Request
from kvasir.native import TreeStats
from kvasir.ports.clock import Rng
from kvasir_router.fleet.health import FleetHealth
from kvasir_router.fleet.transfer_counts import TransferCounts
from kvasir_router.fleet.work import PromptBlocks, Worker, WorkerState
from kvasir_router.index import PrefixSurvey

_BATCHES = 2
_DRAWN = 8
"""With more workers than this, so many are sampled and the best is taken, which is as good as looking at
all."""
_TYPICAL_WEIGHT = 0.05


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The largest batch of an engine."""

    requests: int
    tokens: int


_NOTHING_KNOWN = BatchLimits(requests=0, tokens=0)


class NoIndex:
    """An empty index: inputs rarely share a prefix, so caches are not tracked."""

    def stats(self) -> TreeStats:
        """Return zero for every size."""
        return TreeStats(0, 0, 0, 0, 0, 0, 0, 0, 0)

    def surveyed(self, _survey: PrefixSurvey) -> Iterator[None]:
        """Add nothing."""
        return iter(())


@dataclass(slots=True)
class EmbeddingFleet:
    """`batches` is the largest batch by pool; a worker of another pool gets one leg at a time."""

    batches: Mapping[str, BatchLimits]
    rng: Rng
    health_spec: HealthSpec = field(default_factory=HealthSpec)
    workers: dict[str, Worker] = field(default_factory=dict)
    index: NoIndex = field(default_factory=NoIndex)
    received: TransferCounts = field(default_factory=lambda: TransferCounts({}))
    health: FleetHealth = field(init=False)
    tokens: dict[str, int] = field(default_factory=dict)
    _batches: dict[str, BatchLimits] = field(default_factory=dict)
    _ready: list[str] = field(default_factory=list)
    _typical_tokens: float = 0.0

    def __post_init__(self) -> None:
        self.health = FleetHealth(self.health_spec)

    @property
    def ready(self) -> int:
        """Number of workers that serve."""
        return len(self._ready)

    def blocks(self, request: Request) -> PromptBlocks:
        """Return none: no prefix of inputs is tracked."""
        return PromptBlocks(request.block_hashes[:0], 0, 0)

    # -- workers ---------------------------------------------------------------------------------

    def add(self, worker_id: str, identity: WorkerIdentity, now: float) -> None:
        """Add an unknown worker."""
        self._batches[worker_id] = self.batches.get(identity.pool, _NOTHING_KNOWN)
        self.workers[worker_id] = Worker(worker_id, identity)
        self.tokens[worker_id] = 0
        self.health.join(worker_id, identity.pool, now)
        self._update_ready()

    def remove(self, worker_id: str) -> Worker | None:
        """Remove a worker and the work accounted there."""
        worker = self.workers.pop(worker_id, None)
        if worker is not None:
            del self.tokens[worker_id], self._batches[worker_id]
            self.health.leave(worker_id)
            self._update_ready()
        return worker

    def mark(
        self,
        worker_id: str,
        *,
        interrupted: bool | None = None,
        draining: str | None = None,
        now: float | None = None,
    ) -> None:
        """Set whether new work may be sent to a worker (see Worker); None keeps a value. `interrupted` needs
        `now`."""
        worker = self.workers[worker_id]
        if interrupted is not None and now is not None:
            worker.interrupted = interrupted
            (self.health.interrupted if interrupted else self.health.resumed)(worker_id, now)
        worker.draining = worker.draining if draining is None else draining
        self._update_ready()

    def report(self, worker_id: str, load: EngineLoad) -> None:
        """Store a load that the worker measured."""
        self.workers[worker_id].report(load)

    # -- work ------------------------------------------------------------------------------------

    def charge(self, worker_id: str, leg_id: str, request_id: str, tokens: int, now: float) -> None:
        """A leg is sent to a worker."""
        worker = self.workers[worker_id]
        worker.legs[leg_id] = request_id
        self.tokens[worker_id] += tokens
        self._typical_tokens += _TYPICAL_WEIGHT * (tokens - self._typical_tokens)
        self.health.loaded(worker_id, len(worker.legs), now)

    def discharge(self, worker_id: str, leg_id: str, tokens: int, now: float, *, aborted: bool) -> None:
        """A leg ended; one that was `aborted` still has its last delta to come."""
        worker = self.workers[worker_id]
        if aborted:
            worker.abandon(leg_id, now)
        else:
            del worker.legs[leg_id]
        self.tokens[worker_id] -= tokens
        self.health.loaded(worker_id, len(worker.legs), now)

    def choose(self, now: float, avoid: Set[str] = frozenset()) -> str | None:
        """Return the worker to send to, or None if all that serve have enough. Workers in `avoid`, and those
        that health avoids, are chosen only if no others serve."""
        if not self._ready:
            return None
        avoided = self.health.avoided(now)
        if not avoid and not avoided:
            return self._least(self._ready)
        well = [worker_id for worker_id in self._ready if worker_id not in avoided]
        fresh = [worker_id for worker_id in well or self._ready if worker_id not in avoid]
        return self._least(fresh or well or self._ready)

    def rates(self, worker_id: str) -> None:
        """None: costs are not learned per input, since inputs run in batches."""

    def missing(self) -> str | None:
        """Return what is missing to serve an ordinary request at once, in words."""
        return None if self._ready else "no worker that embeds"

    def kv_status(self, worker_id: str) -> KvStatus | None:
        """None: the caches of these workers are not tracked."""
        return None

    def _least(self, worker_ids: list[str]) -> str | None:
        drawn: Iterable[str] = worker_ids
        if len(worker_ids) > _DRAWN:
            drawn = (worker_ids[self.rng.randrange(len(worker_ids))] for _ in range(_DRAWN))
        free = [worker_id for worker_id in drawn if self._has_room(worker_id)]
        if not free and len(worker_ids) > _DRAWN:
            free = [worker_id for worker_id in worker_ids if self._has_room(worker_id)]
        return min(free, key=self._load_of) if free else None

    def _has_room(self, worker_id: str) -> bool:
        """An idle worker takes any input, which may be longer than a batch."""
        batch, legs = self._batches[worker_id], len(self.workers[worker_id].legs)
        return not legs or (
            legs < _BATCHES * batch.requests and self.tokens[worker_id] < _BATCHES * batch.tokens
        )

    def _load_of(self, worker_id: str) -> tuple[float, float]:
        """Tokens in flight there, where requests of other routers count as typical ones. Ties are broken at
        random."""
        others = self.workers[worker_id].foreign * self._typical_tokens
        return self.tokens[worker_id] + others, self.rng.random()

    def _update_ready(self) -> None:
        self._ready = [
            worker_id for worker_id, worker in self.workers.items() if worker.state is WorkerState.READY
        ]
