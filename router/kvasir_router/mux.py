"""Several models behind one RouterPort, with a separate router for each.

Models share no prefix, KV or worker, so separate routers (index, machine, sessions) lose nothing, and a fault
of one model does not affect the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import fields

from kvasir.core.demand import Traffic, WorkerStats
from kvasir.core.errors import RequestError
from kvasir.core.locality import LinkClass
from kvasir.core.requests import Request, Role
from kvasir.native import TreeStats
from kvasir.ports.router import (
    NO_BROWNOUT,
    Accounting,
    AdmissionView,
    BrownoutView,
    CellView,
    DecisionRecord,
    EndedRequests,
    LinkTransfers,
    PrefixView,
    RegretView,
    RunningView,
    StreamSink,
    WorkerView,
)
from kvasir_router.adapters.models import ModelAdapters
from kvasir_router.recordings.recorder import Recordings
from kvasir_router.sessions.members import no_such_worker
from kvasir_router.sessions.shared_discovery import SharedDiscovery
from kvasir_router.shell import Router


class RouterMux:
    """`kvasir.ports.router.RouterPort` over the routers of `models`, by model name. Call everything on one
    event loop, with `run` running. `recordings` are those that all of them write. `ready_when_any`: ready as
    soon as one model can be served."""

    def __init__(
        self,
        models: Mapping[str, Router],
        discovery: SharedDiscovery,
        *,
        recordings: Recordings,
        ready_when_any: bool,
    ) -> None:
        self._models = dict(models)
        self._routers = tuple(models.values())
        self._discovery = discovery
        self._ready_when_any = ready_when_any
        self._was_ready = False
        self._closing = False
        self.recordings = recordings
        self.adapters = ModelAdapters({name: router.adapters for name, router in models.items()})

    # -- RouterPort ------------------------------------------------------------------------------

    def submit(self, request: Request, sink: StreamSink) -> None:
        """See RouterPort. Raises also RequestError (`model_not_found`, `duplicate_request`)."""
        router = self._models.get(request.model)
        if router is None:
            raise RequestError(
                f"no model {request.model[:256]!r} is routed to", status=404, code="model_not_found"
            )
        router.submit(request, sink)

    def cancel(self, request_id: str) -> None:
        """See RouterPort. Routers that do not have the request ignore it."""
        for router in self._routers:
            router.cancel(request_id)

    def workers(self) -> list[WorkerView]:
        """See RouterPort."""
        views = [view for router in self._routers for view in router.workers()]
        return sorted(views, key=lambda view: (view.pool, view.worker_id))

    def explain(self, request_id: str) -> DecisionRecord | None:
        """See RouterPort."""
        found = (router.explain(request_id) for router in self._routers)
        return next((record for record in found if record is not None), None)

    def regret(self) -> dict[str, RegretView]:
        """See RouterPort."""
        return {model: view for router in self._routers for model, view in router.regret().items()}

    def running(self, most: int) -> list[RunningView]:
        """See RouterPort."""
        return [view for router in self._routers for view in router.running(most)]

    def running_request(self, request_id: str) -> RunningView | None:
        """See RouterPort."""
        found = (router.running_request(request_id) for router in self._routers)
        return next((view for view in found if view is not None), None)

    def ended(self) -> list[EndedRequests]:
        """See RouterPort."""
        return [ended for router in self._routers for ended in router.ended()]

    async def prefixes(self, most: int) -> list[PrefixView]:
        """See RouterPort."""
        return [view for router in self._routers for view in await router.prefixes(most)]

    def drain(self, worker_id: str, draining: bool, reason: str = "") -> None:
        """See RouterPort."""
        for router in self._routers:
            if any(view.worker_id == worker_id for view in router.workers()):
                router.drain(worker_id, draining, reason)
                return
        raise no_such_worker(worker_id, (view.worker_id for view in self.workers()))

    def brownout(self, model: str) -> BrownoutView:
        """See RouterPort."""
        router = self._models.get(model)
        return NO_BROWNOUT if router is None else router.brownout(model)

    def admission(self) -> dict[str, AdmissionView]:
        """See RouterPort."""
        return {model: view for router in self._routers for model, view in router.admission().items()}

    def cells(self) -> list[CellView]:
        """See RouterPort: these are the routers of one."""
        return []

    def not_ready_reason(self) -> str | None:
        """See RouterPort."""
        reasons = {name: reason for name, reason in self.not_ready_models().items() if reason is not None}
        if not reasons or (self._ready_when_any and len(reasons) < len(self._models)):
            return None
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())

    def refusing_reason(self) -> str | None:
        """See RouterPort."""
        if self._closing:
            return "the router is stopping"
        missing = self.not_ready_reason()
        self._was_ready = self._was_ready or missing is None
        return None if self._was_ready else missing

    def not_ready_models(self) -> dict[str, str | None]:
        """See RouterPort."""
        return {name: router.not_ready_reason() for name, router in self._models.items()}

    # -- demand ----------------------------------------------------------------------------------

    def demand(self) -> dict[str, Traffic]:
        """Return counts of requests and outcomes by model."""
        return {model: traffic for router in self._routers for model, traffic in router.demand().items()}

    def worker_figures(self) -> list[WorkerStats]:
        """Return the figures of each worker that has or had work."""
        return [figures for router in self._routers for figures in router.worker_figures()]

    def planned(self, roles: Mapping[str, Role], ready_in_s: Mapping[str, float] | None) -> None:
        """See Router.planned."""
        for router in self._routers:
            router.planned(roles, ready_in_s)

    # -- lifecycle -------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Number of requests that have not ended."""
        return sum(router.in_flight for router in self._routers)

    @property
    def queued(self) -> int:
        """Number of requests that wait for a worker."""
        return sum(router.queued for router in self._routers)

    def accounting(self) -> Accounting:
        """Return the requests served, and the work accounted for them, over all models."""
        accounting = [router.accounting() for router in self._routers]
        return Accounting(
            *(sum(getattr(each, field.name) for each in accounting) for field in fields(Accounting))
        )

    def index_stats(self) -> TreeStats:
        """Return the sum of the index sizes."""
        return TreeStats(*map(sum, zip(*(router.index_stats() for router in self._routers), strict=True)))

    def link_transfers(self) -> dict[str, Mapping[LinkClass, LinkTransfers]]:
        """Return the KV that workers received, by model and class of link."""
        return {model: links for each in self._routers for model, links in each.link_transfers().items()}

    async def run(self) -> None:
        """Serve until `close`. Raises the error of any router's task, after closing all routers."""
        tasks = [
            asyncio.create_task(router.run(), name=f"router-{name}") for name, router in self._models.items()
        ]
        watch = asyncio.create_task(self._discovery.run(), name="router-watch")
        try:
            ended, _ = await asyncio.wait([*tasks, watch], return_when=asyncio.FIRST_COMPLETED)
            if watch in ended and watch.exception() is None:
                # The source was closed: its last answer stays valid.
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            await self.close()
            await asyncio.gather(watch, *tasks, return_exceptions=True)
        for task in (*tasks, watch):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def close(self) -> None:
        """See Router.close. Idempotent."""
        self._closing = True
        await asyncio.gather(*(router.close() for router in self._routers))

    def validate_state(self) -> None:
        """Raise AssertionError unless the state of every router is valid."""
        for router in self._routers:
            router.validate_state()
