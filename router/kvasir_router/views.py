"""What a router answers about its requests and workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain

from kvasir.core.demand import Traffic, WorkerStats
from kvasir.core.identity import WorkerIdentity
from kvasir.core.locality import LinkClass
from kvasir.native import TreeStats
from kvasir.ports.clock import Clock
from kvasir.ports.router import (
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
    SharedPrefix,
    WorkerView,
)
from kvasir_router.adapters.control import AdapterControl
from kvasir_router.adapters.disabled import NoAdapters
from kvasir_router.demand import DemandBook, figures_of
from kvasir_router.fleet.decision_log import DecisionLog
from kvasir_router.fleet.registry import Registry
from kvasir_router.index import PrefixSurvey
from kvasir_router.machine_views import SansIoMachine


class RouterViews:
    """The part of `kvasir.ports.router.RouterPort` that changes nothing; see Router for the arguments. Call
    everything on the event loop that serves."""

    def __init__(
        self,
        machine: SansIoMachine,
        registry: Registry,
        clock: Clock,
        *,
        decisions: DecisionLog,
        adapters: AdapterControl | None,
        scales_to_zero: bool,
        rates_from: Callable[[WorkerIdentity], str],
    ) -> None:
        self._machine = machine
        self._registry = registry
        self._clock = clock
        self._decisions = decisions
        self.adapters = adapters or NoAdapters()
        self._rates_from = rates_from
        self._demand = DemandBook()
        self._sleeps = scales_to_zero
        self._awake_in_s: float | None = None
        self._closing = False
        self._was_ready = False

    def workers(self) -> list[WorkerView]:
        """See RouterPort."""
        return [self._view(known.endpoint.worker_id) for known in self._registry.all()]

    def explain(self, request_id: str) -> DecisionRecord | None:
        """See RouterPort."""
        record = self._decisions.explain(request_id)
        if record is None:
            return None
        chosen = (record.prefill_worker, record.decode_worker)
        known = [each.identity for each in self._registry.all() if each.endpoint.worker_id in chosen]
        begun = {self._rates_from(identity) for identity in known if identity is not None}
        return replace(record, rates=", ".join(sorted(begun)))

    def regret(self) -> dict[str, RegretView]:
        """See RouterPort."""
        return {self._registry.model: self._decisions.regret()}

    def running(self, most: int) -> list[RunningView]:
        """See RouterPort."""
        return self._machine.running(most, self._clock.now())

    def running_request(self, request_id: str) -> RunningView | None:
        """See RouterPort."""
        return self._machine.running_request(request_id, self._clock.now())

    def ended(self) -> list[EndedRequests]:
        """See RouterPort."""
        return [self._decisions.latest]

    async def prefixes(self, most: int) -> list[PrefixView]:
        """See RouterPort."""
        fleet, survey, found = self._machine.fleet, PrefixSurvey(), list[SharedPrefix]()
        for _ in chain(fleet.index.surveyed(survey), survey.largest(most, found)):
            await self._clock.sleep(0)
        block_tokens = max([each.identity.kv.block_size for each in fleet.workers.values()], default=0)
        read = survey.read_blocks
        return [PrefixView(self._registry.model, block_tokens, read, survey.complete, tuple(found))]

    def cells(self) -> list[CellView]:
        """See RouterPort: this is the router of one."""
        return []

    def brownout(self, model: str) -> BrownoutView:
        """See RouterPort."""
        return self._machine.brownout

    def admission(self) -> dict[str, AdmissionView]:
        """See RouterPort."""
        return {self._registry.model: self._machine.admission(self._clock.now())}

    def not_ready_reason(self) -> str | None:
        """See RouterPort."""
        if self._closing:
            return "the router is stopping"
        missing = self._machine.fleet.missing()
        asleep = self._sleeps and self._awake_in_s is not None
        return None if asleep else missing

    def refusing_reason(self) -> str | None:
        """See RouterPort."""
        missing = self.not_ready_reason()
        self._was_ready = self._was_ready or missing is None
        return missing if self._closing or not self._was_ready else None

    def not_ready_models(self) -> dict[str, str | None]:
        """See RouterPort."""
        return {self._registry.model: self.not_ready_reason()}

    def demand(self) -> dict[str, Traffic]:
        """Demand by model, and how it is served."""
        now = self._clock.now()
        view = self._machine.admission(now)
        traffic = self._demand.traffic(
            waiting=view.queued + view.parked,
            waiting_tokens=self._machine.waiting_tokens(),
            parked=view.parked,
            in_flight=self._machine.in_flight,
        )
        return {self._registry.model: traffic}

    def worker_figures(self) -> list[WorkerStats]:
        """What is known of each worker that has or had work."""
        fleet = self._machine.fleet
        return [figures_of(worker, fleet.rates(name)) for name, worker in fleet.workers.items()]

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return self._machine.in_flight

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return self._machine.queued

    def accounting(self) -> Accounting:
        """The accounting of what is served."""
        return self._machine.accounting()

    def index_stats(self) -> TreeStats:
        """Sizes of the prefix index."""
        return self._machine.fleet.index.stats()

    def link_transfers(self) -> dict[str, Mapping[LinkClass, LinkTransfers]]:
        """The KV that workers received, by model and class of link."""
        return {self._registry.model: self._machine.fleet.received.totals()}

    def _busy(self, worker_id: str) -> int:
        worker = self._machine.fleet.workers.get(worker_id)
        return len(worker.legs) if worker is not None else 0

    def _unconfirmed(self) -> int:
        return sum(len(worker.ghosts) for worker in self._machine.fleet.workers.values())

    def _view(self, worker_id: str) -> WorkerView:
        worker = self._machine.fleet.workers.get(worker_id)
        load, assigned = (None, None) if worker is None else (worker.load, worker.assigned)
        fleet = self._machine.fleet
        kv, health = fleet.kv_status(worker_id), fleet.health.view(worker_id, self._clock.now())
        shown = self._registry[worker_id].view(load, self._busy(worker_id), kv, health, assigned)
        held = self.adapters.held(worker_id)
        return replace(shown, adapters=held) if held else shown
