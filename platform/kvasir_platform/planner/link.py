"""Connects a router to the planner: reports the load once a second, and passes on the reply.

Without the planner, workers keep the roles that they were given, but a sleeping model is not reported as
waking.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from kvasir.core.demand import DemandReport, PlannerReply, PoolPlan, Traffic, WorkerStats
from kvasir.core.errors import UpstreamError
from kvasir.core.requests import Role
from kvasir.ports.clock import Clock

log = logging.getLogger(__name__)

PERIOD_S = 1.0
SILENT_S = 10.0


class LoadReporter(Protocol):
    """The part of kvasir_platform.planner.rpc.PlannerClient that is needed."""

    async def tell(self, report: DemandReport) -> PlannerReply: ...


class SizedRouter(Protocol):
    """The part of kvasir_router.shell.Router that is needed."""

    def demand(self) -> Mapping[str, Traffic]: ...

    def worker_figures(self) -> list[WorkerStats]: ...

    def planned(self, roles: Mapping[str, Role], ready_in_s: Mapping[str, float] | None) -> None: ...


class PlannerLink:
    """The link of one router. `run` it until cancelled."""

    def __init__(self, router: SizedRouter, teller: LoadReporter, clock: Clock, router_id: str) -> None:
        self._router = router
        self._teller = teller
        self._clock = clock
        self._router_id = router_id
        self._epoch = ""
        self._sequence = 0
        self._heard_s: float | None = None
        self._lost = False
        self._word = PlannerReply("", False, {}, {}, {})

    def plans(self) -> Mapping[str, PoolPlan]:
        """The pools as of the planner's last reply."""
        return self._word.pools

    def inactive_s(self) -> float:
        """Seconds since the planner's last reply."""
        return 0.0 if self._heard_s is None else max(0.0, self._clock.now() - self._heard_s - PERIOD_S)

    async def run(self) -> None:
        """Exchange one report and reply."""
        while True:
            await self._once()
            # A planner that has just started needs the report at once, under its new epoch.
            if self._word.accepted or self._lost:
                await self._clock.sleep(PERIOD_S)
            else:
                await self._clock.sleep(PERIOD_S / 10)

    async def _once(self) -> None:
        self._sequence += 1
        report = DemandReport(
            self._router_id,
            self._epoch,
            self._sequence,
            dict(self._router.demand()),
            tuple(self._router.worker_figures()),
        )
        now = self._clock.now()
        if self._heard_s is None:
            self._heard_s = now
        try:
            self._word = await self._teller.tell(report)
        except UpstreamError as error:
            if not self._lost:
                log.warning("%s", error.message)
            self._lost = True
            if now - self._heard_s > SILENT_S:
                self._router.planned(self._word.roles, None)
            return
        if self._lost:
            log.warning("the planner responds again after %.0f s", now - self._heard_s)
        self._lost, self._heard_s, self._epoch = False, self._clock.now(), self._word.epoch
        if not self._word.accepted:
            # It does not know the roles yet.
            return
        self._router.planned(self._word.roles, self._word.ready_in_s)
