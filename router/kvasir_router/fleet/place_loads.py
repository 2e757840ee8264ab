"""How much work each place is supposed to have: what was sent from here, and what others are thought to add.

Reported loads lag by a step and a network, so the router counts its own work from the moment it decides; a
report only adds what other routers have put there. Until the next report those are supposed to send in the
proportion in which they have sent so far: several routers that see the same idle worker would otherwise all
take it. So a report counts for less the more has happened since it was made.
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
from kvasir_router.fleet.work import Worker

_MOST_OTHERS = 8.0
"""At most so many times our own requests are others' supposed to have been sent since a report."""
_TYPICAL_WEIGHT = 0.05


class PlaceLoads:
    """Writes work to `columns`. `held_blocks` tells how many blocks a place's cache holds."""

    def __init__(self, columns: Columns, held_blocks: Callable[[RoutingTarget], int]) -> None:
        self._columns = columns
        self._held_blocks = held_blocks
        self._typical_prefill_tokens = 0.0
        self._foreign = self._own_at_reports = 0

    def sent(self, uncached_tokens: int) -> None:
        """A prompt with so much to compute was sent somewhere: it is typical for others' too."""
        self._typical_prefill_tokens += _TYPICAL_WEIGHT * (uncached_tokens - self._typical_prefill_tokens)

    def report(self, worker: Worker, load: EngineLoad) -> None:
        """Take in a worker's own word; its places are still to be written."""
        self.forget(worker)
        worker.report(load)
        self._foreign += worker.foreign
        self._own_at_reports += worker.own_at_report

    def forget(self, worker: Worker) -> None:
        """What the worker last reported counts no more."""
        self._foreign -= worker.foreign
        self._own_at_reports -= worker.own_at_report

    def write(self, place: ColumnRow) -> None:
        """Write what is known of a place to its columns."""
        worker, own, unreported = place.worker, place.own, place.unreported
        foreign, waiting = share(worker.foreign, place), share(worker.foreign_waiting, place)
        if worker.role is Role.PREFILL:
            waiting, foreign = foreign, 0
        others = min(_MOST_OTHERS, self._foreign / self._own_at_reports) if self._own_at_reports else 0.0
        used = 0.0 if worker.reported is None else worker.reported.kv_usage * place.kv_tokens
        ints, floats, row = self._columns.ints, self._columns.floats, place.row
        floats[HEAD_TOKENS, row] = next(iter(place.prompts.values()), 0)
        floats[HEAD_SINCE, row] = place.head_since_s
        # Of a foreign request nothing is known but that it waits: suppose that it is a typical one.
        ints[QUEUED, row] = (
            own.prefill_tokens + unreported.prefill_tokens * others + waiting * self._typical_prefill_tokens
        )
        ints[WAITING, row] = own.waiting + unreported.waiting * others + waiting
        ints[STREAMS, row] = own.streams + unreported.streams * others + foreign
        ints[RESERVED, row] = max(own.kv_tokens, used + unreported.kv_tokens * (1.0 + others))
        ints[HELD, row] = self._held_blocks(place.target) * worker.identity.kv.block_size


def share(requests: int, place: ColumnRow) -> int:
    """One rank's part of what a worker reports for all."""
    return -(-requests // place.ranks)
