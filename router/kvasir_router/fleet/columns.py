"""The places of the fleet as arrays that are updated in place, one row for each rank of each worker.

Policies read the arrays directly: building an object per place in a fleet of hundreds would take longer than
the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from kvasir.core.requests import Role
from kvasir.ports.routing import (
    LINKS,
    LOWER_TIERS,
    BoolColumn,
    Candidates,
    IntColumn,
    LinkColumns,
    LinkGrid,
    RateColumns,
    RoutingTarget,
)
from kvasir_router.decide.rates import RATE_ROWS, rate_columns, write_links, write_rates
from kvasir_router.decide.roofline import CostRates, kv_token_bytes
from kvasir_router.fleet.link_grid import link_grid
from kvasir_router.fleet.work import TargetLoad, Worker

QUEUED, WAITING, STREAMS, RESERVED, HELD, KV_TOKENS, BLOCK_SIZE, WORKER, TROUBLED = range(9)
_INTS = 9
TOKEN_BYTES, HEAD_TOKENS, HEAD_SINCE, TOKENS_PER_S = range(RATE_ROWS, RATE_ROWS + 4)
_FLOATS = RATE_ROWS + 4
# Faster than any engine, so that division by an unknown rate is defined.
_FASTEST_TOKEN_S = 1e-12
# A bit for each lower tier, in the column TROUBLED.
_TIER_BITS = 1 << np.arange(LOWER_TIERS)


@dataclass(slots=True)
class ColumnRow:
    """One row. `own` is the work accounted there, `unreported` the part of it sent after the worker's last
    report, `computed_tokens` the running count of prompt tokens computed there. `prompts` are the pending
    prompts in the order of sending: uncached tokens by the identity of the charge. `head_since_s` is when the
    first of them became first. `kv_tokens` is the capacity, `ranks` the number of the worker's places."""

    target: RoutingTarget
    worker: Worker
    row: int
    own: TargetLoad = field(default_factory=TargetLoad)
    unreported: TargetLoad = field(default_factory=TargetLoad)
    computed_tokens: int = 0
    prompts: dict[int, int] = field(default_factory=dict)
    head_since_s: float = 0.0
    kv_tokens: int = field(init=False)
    ranks: int = field(init=False)

    def __post_init__(self) -> None:
        identity = self.worker.identity
        self.kv_tokens = max(1, identity.kv_blocks * identity.kv.block_size)
        self.ranks = identity.data_parallel_size


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Some rows, with everything about them that is constant between decisions. `rows` is None for all rows
    in order, whose columns need no copy. `grid` is that of all rows, None if no link is known."""

    rows: IntColumn | None
    targets: tuple[RoutingTarget, ...]
    prefills: BoolColumn
    decodes: BoolColumn
    groups: IntColumn
    ints: NDArray[np.int64]
    floats: NDArray[np.float64]
    links: NDArray[np.float64]
    rates: RateColumns
    grid: LinkGrid | None

    def without(self, worker_ids: Set[str], but: RoutingTarget | None = None) -> Selection:
        """Return the rows of other workers, and always `but`."""
        stay = [target.worker_id not in worker_ids or target == but for target in self.targets]
        if all(stay):
            return self
        kept = np.flatnonzero(stay)
        return replace(
            self,
            rows=kept if self.rows is None else self.rows[kept],
            targets=tuple(compress(self.targets, stay)),
            prefills=self.prefills[kept],
            decodes=self.decodes[kept],
            groups=self.groups[kept],
        )

    def candidates(
        self, depths: NDArray[np.uint32], prompt_tokens: int, now: float, prefilled_on: int | None = None
    ) -> Candidates:
        """Return the rows as a policy sees them. `depths` are those of the index, by group and medium, in
        blocks. From the prompt that a place computes, the part is subtracted that it should have computed by
        now. `prefilled_on` is the row, in this selection, that has the KV: only it may prefill."""
        ints, floats, rates = self.ints, self.floats, self.rates
        if self.rows is not None:
            ints, floats = ints.take(self.rows, 1), floats.take(self.rows, 1)
            rates = rate_columns(floats)
        size = ints[BLOCK_SIZE]
        done = now - floats[HEAD_SINCE]
        done *= floats[TOKENS_PER_S]
        np.minimum(done, floats[HEAD_TOKENS], out=done)
        # Engines compute at least the last prompt token, because they sample from it.
        whole_blocks = (prompt_tokens - 1) // size
        # A row for each medium, so that each is contiguous.
        reach: IntColumn = depths.take(self.groups, 0).T.astype(np.int64, order="C")
        np.minimum(reach, whole_blocks, out=reach)
        prefills = self.prefills
        if prefilled_on is not None:
            prefills = np.zeros_like(prefills)
            prefills[prefilled_on] = True
            reach[:, prefilled_on] = whole_blocks[prefilled_on]
        reach *= size
        below: IntColumn = np.subtract(reach[1:].T, reach[:-1].T, order="C")
        if np.count_nonzero(ints[TROUBLED]):
            _without(below, ints[TROUBLED])
        return Candidates(
            targets=self.targets,
            worker=ints[WORKER],
            prefills=prefills,
            decodes=self.decodes,
            cached_tokens=reach[0],
            tier_tokens=below,
            queued_prefill_tokens=ints[QUEUED] - done.astype(np.int64),
            waiting=ints[WAITING],
            streams=ints[STREAMS],
            reserved_kv_tokens=ints[RESERVED],
            held_tokens=ints[HELD],
            kv_tokens=ints[KV_TOKENS],
            kv_token_bytes=floats[TOKEN_BYTES],
            block_size=size,
            rates=rates,
            links=None if self.grid is None else self._links(self.grid),
        )

    def _links(self, grid: LinkGrid) -> LinkColumns:
        links = self.links if self.rows is None else self.links.take(self.rows, 1)
        return LinkColumns(grid, self.rows, links[:LINKS], links[LINKS:])


def _without(below: IntColumn, troubled: IntColumn) -> None:
    """Subtract what troubled tiers add, and what follows it: a prefix ends at a block that cannot be read."""
    lacking = (below > 0) & ((troubled[:, None] & _TIER_BITS) > 0)
    below[np.logical_or.accumulate(lacking, axis=1)] = 0


class Columns:
    """Places by target, and arrays in which row i belongs to `targets[i]`. There are as many rows as places;
    they are renumbered when workers join or leave."""

    def __init__(self) -> None:
        self.targets: tuple[RoutingTarget, ...] = ()
        self.places: dict[RoutingTarget, ColumnRow] = {}
        self.ints: NDArray[np.int64] = np.zeros((_INTS, 0), dtype=np.int64)
        self.floats: NDArray[np.float64] = np.zeros((_FLOATS, 0))
        self.links: NDArray[np.float64] = np.zeros((2 * LINKS, 0))
        self._grid: LinkGrid | None = None
        self._grid_of: tuple[RoutingTarget, ...] = ()
        self._of_workers: dict[str, list[ColumnRow]] = {}
        self._joined = 0

    def join(self, worker: Worker, rates: CostRates) -> None:
        """Add rows for every rank of a new worker."""
        identity = worker.identity
        ranks = identity.data_parallel_size
        first = len(self.targets)
        targets = [RoutingTarget(worker.worker_id, rank) for rank in range(ranks)]
        ints, floats = np.zeros((_INTS, ranks), dtype=np.int64), np.zeros((_FLOATS, ranks))
        links = np.zeros((2 * LINKS, ranks))
        for offset, target in enumerate(targets):
            self.places[target] = ColumnRow(target, worker, first + offset)
        self._of_workers[worker.worker_id] = [self.places[target] for target in targets]
        ints[WORKER] = self._joined
        ints[KV_TOKENS] = self.places[targets[0]].kv_tokens
        ints[BLOCK_SIZE] = max(1, identity.kv.block_size)
        floats[TOKEN_BYTES] = kv_token_bytes(identity)
        write_rates(floats, slice(None), rates)
        write_links(links, slice(None), rates)
        floats[TOKENS_PER_S] = 1.0 / max(rates.prefill_token_s, _FASTEST_TOKEN_S)
        self._joined += 1
        self.targets = (*self.targets, *targets)
        self.ints = np.concatenate((self.ints, ints), axis=1)
        self.floats = np.concatenate((self.floats, floats), axis=1)
        self.links = np.concatenate((self.links, links), axis=1)

    def leave(self, worker_id: str) -> None:
        """Remove the rows of a worker."""
        kept = [row for row, target in enumerate(self.targets) if target.worker_id != worker_id]
        for place in self._of_workers.pop(worker_id, ()):
            del self.places[place.target]
        self.targets = tuple(self.targets[row] for row in kept)
        self.ints = np.ascontiguousarray(self.ints[:, kept])
        self.floats = np.ascontiguousarray(self.floats[:, kept])
        self.links = np.ascontiguousarray(self.links[:, kept])
        for row, target in enumerate(self.targets):
            self.places[target].row = row

    def of_worker(self, worker_id: str) -> list[ColumnRow]:
        """Return the places of a worker, by rank; read-only."""
        return self._of_workers.get(worker_id, [])

    def write_rates(self, worker_ids: Iterable[str], rates: CostRates) -> None:
        """Set the estimated costs of work on some workers."""
        theirs = [place.row for each in worker_ids for place in self.of_worker(each)]
        # Usually all workers change, and a slice takes half as long.
        everybody = len(theirs) == len(self.targets)
        rows = slice(None) if everybody else np.array(theirs, dtype=np.int64)
        write_rates(self.floats, rows, rates)
        write_links(self.links, rows, rates)
        self.floats[TOKENS_PER_S, rows] = 1.0 / max(rates.prefill_token_s, _FASTEST_TOKEN_S)

    def write_troubled(self, worker_id: str, media: Iterable[int]) -> None:
        """Set which lower tiers (kvasir.core.kv.Medium) of a worker are not used for now."""
        rows = [place.row for place in self.of_worker(worker_id)]
        self.ints[TROUBLED, rows[0] : rows[-1] + 1] = sum(1 << (medium - 1) for medium in media)

    def select(
        self, rows: Sequence[int], group: Callable[[RoutingTarget], int], *, any_role: bool = False
    ) -> Selection:
        """Return these rows; valid until workers join or leave, or groups change. `any_role`: workers that
        can run whole requests may run either part."""
        targets = tuple(self.targets[row] for row in rows)
        workers = [self.places[target].worker for target in targets]
        roles = [Role.BOTH if any_role and worker.any_role else worker.role for worker in workers]
        whole = len(rows) == len(self.targets) and list(rows) == list(range(len(rows)))
        return Selection(
            rows=None if whole else np.array(rows, dtype=np.int64),
            targets=targets,
            prefills=np.array([role is not Role.DECODE for role in roles], dtype=np.bool_),
            decodes=np.array([role is not Role.PREFILL for role in roles], dtype=np.bool_),
            groups=np.array([group(target) for target in targets], dtype=np.int64),
            ints=self.ints,
            floats=self.floats,
            links=self.links,
            rates=rate_columns(self.floats),
            grid=self._links_between(),
        )

    def _links_between(self) -> LinkGrid | None:
        """Return the grid of all rows. It is made once after workers joined or left, and not in a decision of
        which nothing changed."""
        if self._grid_of is not self.targets:
            localities = [self.places[target].worker.identity.locality for target in self.targets]
            self._grid = link_grid(localities, self.ints[WORKER])
            self._grid_of = self.targets
        return self._grid
