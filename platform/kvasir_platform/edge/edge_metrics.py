"""The metrics of a router with edges: the same page from every edge."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable

from kvasir_platform.edge.exposition import Families, lasting, merged, merged_parts, parse
from kvasir_platform.gateway.operator.status_page import in_turns, joined_in_turns

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""An edge that takes longer is included with its previous page."""


class EdgeMetrics:
    """Collects the metrics of all edges and of the core, which `own` returns metric by metric.

    Edges join and leave by name. One collection runs at a time; concurrent callers share its result.
    """

    def __init__(self, own: Callable[[], Iterable[bytes]]) -> None:
        self._own = own
        self._ask: dict[str, Callable[[int], None]] = {}
        self._known: dict[str, Families] = {}
        self._gone: Families = {}
        self._rounds = itertools.count(1)
        self._round = 0
        self._missing: set[str] = set()
        self._waiting: list[Callable[[bytes], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._showing: set[asyncio.Task[None]] = set()

    def join(self, edge: str, ask: Callable[[int], None]) -> None:
        """Add an edge, which responds to the number of a round through `heard`."""
        self._ask[edge] = ask

    def leave(self, edge: str) -> None:
        """Remove an edge; its counters are kept."""
        del self._ask[edge]
        known = self._known.pop(edge, None)
        if known is not None:
            self._gone = merged((self._gone, lasting(known)))
        self._missing.discard(edge)
        self._finish_if_whole()

    def collect(self, then: Callable[[bytes], None]) -> None:
        """Call `then` with all metrics, after PATIENCE_S at the latest."""
        self._waiting.append(then)
        if len(self._waiting) > 1:
            return
        self._round = next(self._rounds)
        self._missing = set(self._ask)
        for ask in self._ask.values():
            ask(self._round)
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._finish)
        self._finish_if_whole()

    def heard(self, edge: str, number: int, text: bytes) -> None:
        """Handle the response of an edge."""
        self._known[edge] = parse(text)
        if number == self._round:
            self._missing.discard(edge)
            self._finish_if_whole()

    def _finish_if_whole(self) -> None:
        if self._waiting and not self._missing:
            self._finish()

    def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._show(waiting), name="metrics")
        self._showing.add(task)
        task.add_done_callback(self._showing.discard)

    async def _show(self, waiting: list[Callable[[bytes], None]]) -> None:
        try:
            page = await self._page()
        except Exception:  # Nothing else would hear of it.
            log.exception("cannot render the metrics")
        else:
            for then in waiting:
                then(page)

    async def _page(self) -> bytes:
        own: Families = {}
        async for part in in_turns(self._own()):
            own.update(parse(part))
        return await joined_in_turns(merged_parts((own, self._gone, *self._known.values())))
