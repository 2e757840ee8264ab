"""The port between edge and core router: submit tokens, receive deltas, without knowledge of workers.

The edge can run in the same process or in another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, Request
from kvasir.ports.recordings import RecordingPort
from kvasir.ports.views.cells import CellModelView, CellView
from kvasir.ports.views.decisions import (
    CandidateRecord,
    DecisionRecord,
    PhaseRecord,
    RegretView,
)
from kvasir.ports.views.ended import EndedRequests
from kvasir.ports.views.fleet import (
    HEALTH_STATES,
    NO_BROWNOUT,
    Accounting,
    AdmissionView,
    BrownoutView,
    HealthView,
    LinkTransfers,
    PrefixView,
    ServedAdapter,
    SharedPrefix,
    WorkerView,
)
from kvasir.ports.views.summaries import (
    LostAttempt,
    RequestSummary,
    RunningView,
)

__all__ = [
    "HEALTH_STATES",
    "NO_BROWNOUT",
    "Accounting",
    "AdapterCatalog",
    "AdapterPort",
    "AdmissionView",
    "BrownoutView",
    "CandidateRecord",
    "CellModelView",
    "CellView",
    "DecisionRecord",
    "EndedRequests",
    "HealthView",
    "Lane",
    "LinkTransfers",
    "LostAttempt",
    "PhaseRecord",
    "PrefixView",
    "RegretView",
    "RequestPort",
    "RequestSummary",
    "RouterPort",
    "RunningView",
    "ServedAdapter",
    "SharedPrefix",
    "StreamSink",
    "WorkerView",
]


class Lane(Protocol):
    """A fast path to one client for the plain deltas of one stream, which bypasses `on_delta` while `open`;
    see kvasir.native."""

    @property
    def open(self) -> bool: ...

    def close(self) -> None:
        """Send nothing more over the fast path. Idempotent."""
        ...


class StreamSink(Protocol):
    """Receives one request's output on the router's event loop; must not block or raise.

    Any number of `on_delta`, then exactly one of `on_finish` and `on_error`.
    """

    def on_delta(self, delta: Delta) -> None: ...

    def lane(self, request_id: str) -> Lane | None:
        """Return a fast path for the next deltas of this request if it has one choice and its client receives
        deltas unchanged, else None. Called after a delta. The caller closes it before another `on_delta`."""
        ...

    def on_finish(self, summary: RequestSummary) -> None: ...

    def on_error(self, error: KvasirError, summary: RequestSummary) -> None: ...


class AdapterCatalog(Protocol):
    """The adapters that were loaded at run time."""

    def served(self) -> Mapping[str, ServedAdapter]:
        """Return, by name, those for which a request can be served. Cheap: called for each request."""
        ...


class AdapterPort(AdapterCatalog, Protocol):
    """Loads and unloads adapters at run time. Errors are RequestErrors, whose codes are in
    kvasir.telemetry.reasons."""

    async def load(self, model: str | None, name: str, source: str, replicas: int) -> tuple[str, ...]:
        """Load an adapter of `model` (None: the first that can have adapters) on `replicas` workers of each
        of its pools, 0 for all. Return the workers that hold it."""
        ...

    async def unload(self, name: str) -> tuple[str, ...]:
        """Unload an adapter once the requests that use it have ended; new ones are refused at once. Return
        the workers that held it."""
        ...


class RequestPort(Protocol):
    """The request interface of a router. Obligations: every accepted request ends in exactly one on_finish or
    on_error; after `cancel`, which frees the request on every worker, its sink is not called.
    """

    def submit(self, request: Request, sink: StreamSink) -> None:
        """Accept a request. Raises CapacityError if there is no capacity."""
        ...

    def cancel(self, request_id: str) -> None:
        """Cancel a request, because its client has disconnected; unknown or finished ids are ignored."""
        ...

    @property
    def adapters(self) -> AdapterCatalog:
        """The adapters that were loaded at run time."""
        ...

    def brownout(self, model: str) -> BrownoutView:
        """Return the state of brown-out for a model; inactive for an unknown one. Cheap: called before each
        request."""
        ...

    def not_ready_reason(self) -> str | None:
        """Return None if a request can be served at once, else what is missing."""
        ...

    def refusing_reason(self) -> str | None:
        """Return None if clients may send requests, else why not. It stays None from the first time that the
        deployment was ready until the router stops: requests then wait for workers that are lost, or are
        refused one by one."""
        ...

    def not_ready_models(self) -> dict[str, str | None]:
        """Return, by model name, None if a request for the model can be served at once, else what is
        missing."""
        ...


class RouterPort(RequestPort, Protocol):
    """The interface of a router within its own process: requests, and views and commands for operators."""

    @property
    def recordings(self) -> RecordingPort:
        """Records requests for readers."""
        ...

    @property
    def adapters(self) -> AdapterPort:
        """Loads and unloads adapters."""
        ...

    def workers(self) -> list[WorkerView]:
        """Return all known workers, ordered by pool and id."""
        ...

    def explain(self, request_id: str) -> DecisionRecord | None:
        """Return the decision for a request in flight or among the last ended ones, else None."""
        ...

    def regret(self) -> Mapping[str, RegretView]:
        """Return the regret of all decisions since the start, by model."""
        ...

    @property
    def in_flight(self) -> int:
        """The number of requests that have not ended."""
        ...

    def running(self, most: int) -> list[RunningView]:
        """Return the requests that have not ended, of each model the `most` that arrived first. Costs a few
        microseconds for each request that is returned, however many run."""
        ...

    def ended(self) -> list[EndedRequests]:
        """Return, for each model, the summaries of the requests that ended last: those whose decisions are
        kept."""
        ...

    def running_request(self, request_id: str) -> RunningView | None:
        """Return a request that has not ended, else None."""
        ...

    async def prefixes(self, most: int) -> list[PrefixView]:
        """Return up to `most` of the largest shared prefixes of each model. Reads a bounded part of the
        index, in slices between other work."""
        ...

    def drain(self, worker_id: str, draining: bool, reason: str = "") -> None:
        """Drain a worker, or (`draining` False) return it to service. Returns at once; `workers` shows the
        state when the worker has confirmed it, on this router and on every other. A stopping worker continues
        to drain. Raises RequestError 404 (`worker_not_found`) for an unknown worker, and UpstreamError
        (`session_lost`) for one that is not connected."""
        ...

    def admission(self) -> dict[str, AdmissionView]:
        """Return the queue, pressure and brown-out by model."""
        ...

    def cells(self) -> list[CellView]:
        """Return this cell and the others, none if the deployment has no regions."""
        ...
