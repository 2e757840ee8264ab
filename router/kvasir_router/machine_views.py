"""What the shell asks of the machine that it carries for: requests that generate and requests that embed have
machines of their own, and one way to the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvasir.core.kv import KvStatus
from kvasir.native import TreeStats
from kvasir.ports.router import Accounting, AdmissionView, BrownoutView, HealthView
from kvasir_router.decide.roofline import CostRates
from kvasir_router.fleet.work import Worker
from kvasir_router.requests.events import Effect, Event


class IndexView(Protocol):
    """What a machine knows of its workers' caches."""

    def stats(self) -> TreeStats:
        """Its sizes."""
        ...


class HealthOf(Protocol):
    """How workers answer."""

    def view(self, worker_id: str, now: float) -> HealthView:
        """As status and metrics show it."""
        ...


class FleetView(Protocol):
    """The workers that a machine puts work on."""

    @property
    def workers(self) -> Mapping[str, Worker]:
        """Those that serve, by the id of their sessions."""
        ...

    @property
    def index(self) -> IndexView: ...

    @property
    def health(self) -> HealthOf: ...

    def rates(self, worker_id: str) -> CostRates | None:
        """What work costs there; None where nothing is learned of it."""
        ...

    def missing(self) -> str | None:
        """What is lacking to serve an ordinary request at once, in words."""
        ...

    def kv_status(self, worker_id: str) -> KvStatus | None:
        """The worker's cache as it is seen here; None where nothing is kept of it."""
        ...


class SansIoMachine(Protocol):
    """Requests from their arrival to their one end, without I/O. See RequestMachine."""

    @property
    def fleet(self) -> FleetView: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def queued(self) -> int: ...

    @property
    def brownout(self) -> BrownoutView: ...

    def admission(self, now: float) -> AdmissionView: ...

    def accounting(self) -> Accounting: ...

    def waiting_tokens(self) -> int: ...

    def next_wakeup(self) -> float | None: ...

    def handle(self, event: Event, now: float) -> list[Effect]: ...

    def validate_state(self) -> None: ...
