"""Estimates the work at each place: what this router sent, and what other routers are expected to add.

Reported loads lag by a step and a network delay, so the router counts its own work from the decision on; a
report adds only what other routers sent. Until the next report, the others are assumed to send in the same
proportion as before: otherwise several routers that see the same idle worker would all choose it. A report
therefore counts for less the more was sent since it was made.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir.core.requests import EngineLoad, Role
from kvasir.ports.routing import RoutingTarget
from kvasir_router.fleet.columns import (
    HEAD_SINCE,
    HEAD_TOKENS,
    HELD,
    QUEUED,
    RESERVED,
    STREAMS,
    WAITING,
    ColumnRow,
    Columns,
)
from kvasir_router.fleet.role_gap import RoleGap
from kvasir_router.fleet.work import Worker

_MOST_OTHERS = 8.0
"""Upper limit of the work assumed of other routers since a report, as a multiple of our own."""
_TYPICAL_WEIGHT = 0.05


class PlaceLoads:
    """Writes work to `columns`. `held_blocks` returns the number of blocks in a place's cache. Other routers
    run whole requests on prefill workers while the `gap` is open here."""

    def __init__(self, columns: Columns, held_blocks: Callable[[RoutingTarget], int], gap: RoleGap) -> None:
        self._columns = columns
        self._held_blocks = held_blocks
        self._gap = gap
        self._typical_prefill_tokens = 0.0
        self._foreign = self._own_at_reports = 0

    def sent(self, uncached_tokens: int) -> None:
        """Update the typical prompt length with a prompt that was sent; it is used for other routers'
        prompts."""
        self._typical_prefill_tokens += _TYPICAL_WEIGHT * (uncached_tokens - self._typical_prefill_tokens)

    def report(self, worker: Worker, load: EngineLoad) -> None:
        """Store a worker's report; its places are written by the caller."""
        self.forget(worker)
        worker.report(load)
        self._foreign += worker.foreign
        self._own_at_reports += worker.own_at_report

    def forget(self, worker: Worker) -> None:
        """Drop what the worker last reported."""
        self._foreign -= worker.foreign
        self._own_at_reports -= worker.own_at_report

    def write(self, place: ColumnRow) -> None:
        """Write the work at a place to its columns."""
        worker, own, unreported = place.worker, place.own, place.unreported
        foreign = share(worker.foreign, place) if worker.foreign else 0
        waiting = share(worker.foreign_waiting, place) if worker.foreign_waiting else 0
        if worker.role is Role.PREFILL and not self._gap.open:
            waiting, foreign = foreign, 0
        others = min(_MOST_OTHERS, self._foreign / self._own_at_reports) if self._own_at_reports else 0.0
        used = 0.0 if worker.reported is None else worker.reported.kv_usage * place.kv_tokens
        ints, floats, row = self._columns.ints, self._columns.floats, place.row
        floats[HEAD_TOKENS, row] = next(iter(place.prompts.values())) if place.prompts else 0
        floats[HEAD_SINCE, row] = place.head_since_s
        # Of a foreign request only its wait is known: assume a typical one.
        ints[QUEUED, row] = (
            own.prefill_tokens + unreported.prefill_tokens * others + waiting * self._typical_prefill_tokens
        )
        ints[WAITING, row] = own.waiting + unreported.waiting * others + waiting
        ints[STREAMS, row] = own.streams + unreported.streams * others + foreign
        ints[RESERVED, row] = max(own.kv_tokens, used + unreported.kv_tokens * (1.0 + others))
        ints[HELD, row] = self._held_blocks(place.target) * worker.identity.kv.block_size


def share(requests: int, place: ColumnRow) -> int:
    """One rank's part of a worker's total."""
    return -(-requests // place.ranks)
