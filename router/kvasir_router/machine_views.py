"""The interface that the shell needs of a machine. Generation and embedding have separate machines, and share
one way to the workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from kvasir.core.kv import KvStatus
from kvasir.core.locality import LinkClass
from kvasir.core.requests import Request
from kvasir.native import TreeStats
from kvasir.ports.router import (
    Accounting,
    AdmissionView,
    BrownoutView,
    HealthView,
    LinkTransfers,
    RunningView,
)
from kvasir_router.decide.roofline import CostRates
from kvasir_router.fleet.work import PromptBlocks, Worker
from kvasir_router.index import PrefixSurvey
from kvasir_router.requests.events import Effect, Event


class IndexView(Protocol):
    """A machine's index of its workers' caches."""

    def stats(self) -> TreeStats:
        """Return the index's sizes."""
        ...

    def surveyed(self, survey: PrefixSurvey) -> Iterator[None]:
        """Add to `survey` what workers hold, up to its bound. Yields between slices of the work."""
        ...


class HealthOf(Protocol):
    """The health of workers."""

    def view(self, worker_id: str, now: float) -> HealthView:
        """Return the health for status and metrics."""
        ...


class TransferCountsView(Protocol):
    """Counts of the KV that workers received."""

    def totals(self) -> Mapping[LinkClass, LinkTransfers]:
        """Return the counts of each class of link over which anything was received."""
        ...


class FleetView(Protocol):
    """The workers of a machine."""

    @property
    def workers(self) -> Mapping[str, Worker]:
        """The workers that serve, by session id."""
        ...

    @property
    def index(self) -> IndexView: ...

    @property
    def health(self) -> HealthOf: ...

    @property
    def received(self) -> TransferCountsView: ...

    def rates(self, worker_id: str) -> CostRates | None:
        """Return the costs of work there; None if they are not learned."""
        ...

    def missing(self) -> str | None:
        """Return what is missing to serve an ordinary request at once, in words."""
        ...

    def blocks(self, request: Request) -> PromptBlocks:
        """Return the names of the prompt's blocks, for recordings."""
        ...

    def kv_status(self, worker_id: str) -> KvStatus | None:
        """Return the worker's cache as the router tracks it; None if it is not tracked."""
        ...


class SansIoMachine(Protocol):
    """Handles requests from arrival to end, without I/O. See RequestMachine."""

    @property
    def fleet(self) -> FleetView: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def queued(self) -> int: ...

    @property
    def brownout(self) -> BrownoutView: ...

    def admission(self, now: float) -> AdmissionView: ...

    def running(self, most: int, now: float) -> list[RunningView]: ...

    def running_request(self, request_id: str, now: float) -> RunningView | None: ...

    def accounting(self) -> Accounting: ...

    def waiting_tokens(self) -> int: ...

    def next_wakeup(self) -> float | None: ...

    def handle(self, event: Event, now: float) -> list[Effect]: ...

    def validate_state(self) -> None: ...
