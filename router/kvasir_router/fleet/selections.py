"""The places among which a request is placed: those that serve it, without those to be avoided.

Selections are cached between decisions, since a worker may be avoided for a minute and a decision takes
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvasir.core.media.prompts import MediaKind, kinds_of
from kvasir.core.requests import Request, Role
from kvasir.ports.routing import RoutingTarget
from kvasir_router.fleet.columns import Columns, Selection
from kvasir_router.fleet.role_gap import RoleGap
from kvasir_router.fleet.work import Worker, WorkerState
from kvasir_router.index import FleetIndex

_MOST = 64

_Key = tuple[str, str | None, frozenset[MediaKind] | None, frozenset[str]]


class Selections:
    """Selections of `columns`, from workers that are READY. While the `gap` is open, all that can run whole
    requests may run either part."""

    def __init__(
        self, columns: Columns, workers: Mapping[str, Worker], index: FleetIndex, gap: RoleGap
    ) -> None:
        self._columns = columns
        self._workers = workers
        self._index = index
        self._gap = gap
        self._kept: dict[_Key, Selection] = {}
        self._revision = -1
        self._described: tuple[RoutingTarget, ...] = ()
        self._descriptions: tuple[tuple[str, str], ...] = ()

    def forget(self) -> None:
        """Drop the cache: workers joined or left, or began or stopped taking work."""
        self._kept.clear()

    def of(
        self,
        request: Request,
        avoid: frozenset[str],
        unwell: frozenset[str],
        prefilled_on: RoutingTarget | None,
    ) -> Iterator[Selection]:
        """Return the places that serve this request, in the order to try: without the workers of both sets,
        then with those in `avoid`, then with all. With `prefilled_on`, that place and those that decode. A
        request with a worker avoids those that could stand in for it."""
        if request.worker:
            avoid |= self._others(request.worker)
        if self._revision != self._index.revision:
            self._kept.clear()
            self._revision = self._index.revision
        size = -1
        for without in (avoid | unwell if avoid and unwell else avoid or unwell, unwell, frozenset[str]()):
            selection = self._selected(request, without, prefilled_on)
            if len(selection.targets) != size:
                size = len(selection.targets)
                yield selection

    def describe(self, targets: tuple[RoutingTarget, ...]) -> tuple[tuple[str, str], ...]:
        """Return the pool of each place, and how well its cache is known."""
        # Most decisions are among the places of the last one. When something changes, selections have others.
        if targets is not self._described:
            self._described = targets
            workers = [self._workers[each.worker_id] for each in targets]
            self._descriptions = tuple(
                [(each.identity.pool, self._index.state(each.worker_id)) for each in workers]
            )
        return self._descriptions

    def _others(self, worker_id: str) -> frozenset[str]:
        """Return the workers that could stand in for this one: of its role, all for one of role BOTH; none if
        it is unknown."""
        named = self._workers.get(worker_id)
        if named is None:
            return frozenset()
        return frozenset(
            each
            for each, worker in self._workers.items()
            if each != worker_id and named.role in (Role.BOTH, worker.role)
        )

    def _selected(
        self, request: Request, without: frozenset[str], prefilled_on: RoutingTarget | None
    ) -> Selection:
        if prefilled_on is not None:
            return self._select(request, prefilled_on).without(without, but=prefilled_on)
        media = kinds_of(request.media) if request.media else None
        key = (request.model, request.adapter, media, without)
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= _MOST:
                self._kept.clear()
            if without:
                kept = self._selected(request, frozenset(), None).without(without)
            else:
                kept = self._select(request, None)
            self._kept[key] = kept
        return kept

    def _select(self, request: Request, prefilled_on: RoutingTarget | None) -> Selection:
        targets = self._columns.targets
        rows = [row for row, target in enumerate(targets) if self._serves(target, request)]
        if prefilled_on is not None:
            source = self._columns.places[prefilled_on].row
            decode = (row for row in rows if self._workers[targets[row].worker_id].role is not Role.PREFILL)
            rows = sorted({source, *decode})
        return self._columns.select(rows, self._index.group, any_role=self._gap.open)

    def _serves(self, target: RoutingTarget, request: Request) -> bool:
        worker = self._workers[target.worker_id]
        return (
            worker.state is WorkerState.READY
            and worker.identity.model == request.model
            and worker.takes(request)
        )
