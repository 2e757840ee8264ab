"""A router over several cells: the port of this cell's router, whose requests may run in other cells.

Views and commands are those of this cell. Requests of other cells are given to this cell's own router, and
never come here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvasir.core.requests import Request
from kvasir.ports.clock import Clock
from kvasir.ports.limits import RateLimits
from kvasir.ports.recordings import RecordingPort
from kvasir.ports.router import (
    AdapterPort,
    AdmissionView,
    BrownoutView,
    CellView,
    DecisionRecord,
    EndedRequests,
    PrefixView,
    RegretView,
    RouterPort,
    RunningView,
    StreamSink,
    WorkerView,
)
from kvasir_platform.regions.dispatch import CellDispatch
from kvasir_platform.regions.lease import BEATS
from kvasir_platform.regions.needs.adapters import CellAdapters
from kvasir_platform.regions.peer import PeerCell
from kvasir_platform.regions.reporting import OwnReports
from kvasir_platform.regions.serving import CellServing
from kvasir_platform.regions.sharing.budgets import CellBudgets
from kvasir_platform.regions.sharing.limits import CellLimits
from kvasir_platform.regions.views import cell_views
from kvasir_router.regions.reports import INTERVAL_S
from kvasir_router.regions.view import RegionView

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CellParts:
    """What a router over several cells consists of; `router` is this cell's own."""

    router: RouterPort
    dispatch: CellDispatch
    peers: Mapping[str, PeerCell]
    serving: CellServing
    limits: CellLimits
    budgets: CellBudgets
    own: OwnReports
    view: RegionView


class RegionRouter:
    """`kvasir.ports.router.RouterPort` of a cell with peers. Call everything on one event loop, with `run`
    running. `lease_s` is `lost_after_s` of the spec."""

    def __init__(self, parts: CellParts, clock: Clock, *, lease_s: float) -> None:
        self._router = parts.router
        self._dispatch = parts.dispatch
        self._peers = parts.peers
        self._serving = parts.serving
        self._limits = parts.limits
        self._budgets = parts.budgets
        self._own = parts.own
        self._view = parts.view
        self._adapters = CellAdapters(parts.router.adapters)
        self._clock = clock
        self._lease_s = lease_s
        self._was_ready = False
        self._failures = 0

    def leave(self) -> None:
        """Have other cells send no more requests here. Idempotent."""
        self._own.draining = True

    async def start(self) -> None:
        """Listen for other cells. Raise ConfigError if the address cannot be bound."""
        await self._serving.start()

    async def run(self) -> None:
        """Once started: keep the links to other cells, and serve theirs, until cancelled. Raise
        the error of what failed."""
        tasks = [
            *(asyncio.create_task(peer.run(), name=f"cell-{name}") for name, peer in self._peers.items()),
            asyncio.create_task(self._tick(), name="cell-tick"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._serving.stop()
        for task in done:
            task.result()

    def limits(self, inner: RateLimits) -> RateLimits:
        """Return the rate limits of all cells over those of this one."""
        return self._limits.over(inner)

    async def _tick(self) -> None:
        asked_s, interval_s = float("-inf"), self._lease_s / BEATS
        while True:
            before = self._clock.now()
            await self._clock.sleep(interval_s)
            # What runs for others ends in time, whatever has kept this process.
            self._serving.tick()
            if self._clock.now() - before > 2 * interval_s:
                # What came while this process did not run is not read yet: others are not lost for that.
                await self._clock.sleep(interval_s / 2)
            for peer in self._peers.values():
                self._guarded(peer.tick)
            self._guarded(self._dispatch.leave_home)
            if (now := self._clock.now()) - asked_s >= INTERVAL_S:
                asked_s = now
                self._guarded(self._limits.tick)
                self._guarded(self._budgets.tick)
                self._guarded(self._hear_adapters)

    def _hear_adapters(self) -> None:
        self._adapters.heard(self._dispatch.reachable())

    def _guarded(self, step: Callable[[], None]) -> None:
        """Do one step. That it fails must not end links on which requests run: it is logged, less often the
        more often it fails, and counted."""
        try:
            step()
        except Exception:
            self._failures += 1
            if self._failures & (self._failures - 1) == 0:
                log.exception("keeping the links to other cells has failed %d times", self._failures)

    # -- requests

    def submit(self, request: Request, sink: StreamSink) -> None:
        """See RouterPort and CellDispatch.submit."""
        self._dispatch.submit(request, sink)

    def cancel(self, request_id: str) -> None:
        """See RouterPort."""
        self._dispatch.cancel(request_id)

    def not_ready_reason(self) -> str | None:
        """See RouterPort."""
        if (missing := self._router.not_ready_reason()) is None:
            return None
        reasons = {name: reason for name, reason in self.not_ready_models().items() if reason is not None}
        return missing if reasons else None

    def refusing_reason(self) -> str | None:
        """See RouterPort."""
        if (refusing := self._router.refusing_reason()) is None:
            self._was_ready = True
            return None
        if self._was_ready or self._own.draining:
            return refusing
        return self.not_ready_reason()

    def not_ready_models(self) -> dict[str, str | None]:
        """See RouterPort. A model that another cell serves is ready."""
        return {
            model: None if reason is None or self._dispatch.serves(model) else reason
            for model, reason in self._router.not_ready_models().items()
        }

    def cells(self) -> list[CellView]:
        """See RouterPort."""
        failures = self._failures + self._serving.failures
        return cell_views(
            self._dispatch, self._peers, self._view, self._serving, self._clock.now(), failures=failures
        )

    @property
    def in_flight(self) -> int:
        """See RouterPort. Those in other cells are included."""
        return self._router.in_flight + self._dispatch.away

    # -- this cell

    @property
    def recordings(self) -> RecordingPort:
        """See RouterPort."""
        return self._router.recordings

    @property
    def adapters(self) -> AdapterPort:
        """See RouterPort. Those of other cells are served as well."""
        return self._adapters

    def brownout(self, model: str) -> BrownoutView:
        """See RouterPort."""
        return self._router.brownout(model)

    def workers(self) -> list[WorkerView]:
        """See RouterPort."""
        return self._router.workers()

    def explain(self, request_id: str) -> DecisionRecord | None:
        """See RouterPort. The decision about a request in another cell is that cell's."""
        return self._router.explain(request_id)

    def regret(self) -> Mapping[str, RegretView]:
        """See RouterPort."""
        return self._router.regret()

    def running(self, most: int) -> list[RunningView]:
        """See RouterPort."""
        return self._router.running(most)

    def running_request(self, request_id: str) -> RunningView | None:
        """See RouterPort."""
        return self._router.running_request(request_id)

    def ended(self) -> list[EndedRequests]:
        """See RouterPort."""
        return self._router.ended()

    async def prefixes(self, most: int) -> list[PrefixView]:
        """See RouterPort."""
        return await self._router.prefixes(most)

    def drain(self, worker_id: str, draining: bool, reason: str = "") -> None:
        """See RouterPort."""
        self._router.drain(worker_id, draining, reason)

    def admission(self) -> dict[str, AdmissionView]:
        """See RouterPort."""
        return self._router.admission()
