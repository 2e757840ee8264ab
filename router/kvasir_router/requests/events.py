"""The events that a request machine handles, and the effects that it returns.

Both are frozen values, so that a history can be recorded and replayed. A worker is named by the id of its
session, which is that of its endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvasir.core.errors import KvasirError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvSnapshotPart
from kvasir.core.requests import Delta, EngineRequest, Request, Role, StepBatch
from kvasir.core.values import value
from kvasir.ports.router import RequestSummary
from kvasir_router.index import CancelSnapshot, FetchSnapshot


@value
class RequestArrived:
    """A client's request. The only event for which `handle` may raise."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client left or was disconnected. `outcome` goes into the summary."""

    request_id: str
    outcome: str = "client_closed"


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A session is up. If the identity is the known one, the session resumed and its legs go on."""

    worker_id: str
    identity: WorkerIdentity


@dataclass(frozen=True, slots=True)
class WorkerInterrupted:
    """The connection broke and may resume: its legs go on, and no new work is sent."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """The worker takes no new work; its legs go on."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerRestored:
    """The worker stops draining."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The session is over, with everything that ran in it."""

    worker_id: str
    reason: str


@value
class StepReceived:
    """One message of a worker."""

    worker_id: str
    batch: StepBatch


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A part of a fetched snapshot, in order."""

    worker_id: str
    attempt: int
    part: KvSnapshotPart


@dataclass(frozen=True, slots=True)
class SnapshotEnded:
    """The call for a snapshot ended. `final`: after this `error`, a retry is useless."""

    worker_id: str
    attempt: int
    error: str | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class TimerTick:
    """Time has passed; due when `next_wakeup` is reached."""


@dataclass(frozen=True, slots=True)
class ShuttingDown:
    """The router stops: every request ends with `shutting_down`."""


@dataclass(frozen=True, slots=True)
class PlanReceived:
    """A message of the planner: the roles of workers whose role differs from that of their pool, and the
    seconds until workers may be ready while there are none; None if that is unknown."""

    roles: Mapping[str, Role]
    ready_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class AdaptersChanged:
    """The keys of the adapters that a worker has loaded at run time. Ignored for an unknown worker."""

    worker_id: str
    adapters: frozenset[str]


MembershipEvent = WorkerReady | WorkerInterrupted | WorkerDraining | WorkerRestored | WorkerLost
SnapshotEvent = SnapshotPart | SnapshotEnded
Event = (
    RequestArrived
    | RequestCancelled
    | MembershipEvent
    | StepReceived
    | SnapshotEvent
    | TimerTick
    | PlanReceived
    | AdaptersChanged
    | ShuttingDown
)


@value
class SubmitTo:
    """Start a leg on a worker."""

    worker_id: str
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class AbortOn:
    """Abort legs on a worker."""

    worker_id: str
    leg_ids: tuple[str, ...]


@value
class ReleaseOn:
    """Release leases on a worker; harmless for leases that have ended."""

    worker_id: str
    lease_ids: tuple[str, ...]


@value
class EmitDelta:
    """Send a delta to the client. Its `request_id` is the client's."""

    request_id: str
    delta: Delta


@value
class FinishRequest:
    """The request ended well; nothing follows."""

    request_id: str
    summary: RequestSummary


@dataclass(frozen=True, slots=True)
class FailRequest:
    """The request failed; nothing follows."""

    request_id: str
    error: KvasirError
    summary: RequestSummary


@dataclass(frozen=True, slots=True)
class ClientGone:
    """A cancelled request ended; only observers receive it."""

    request_id: str
    summary: RequestSummary


SnapshotEffect = FetchSnapshot | CancelSnapshot
Effect = (
    SubmitTo | AbortOn | ReleaseOn | EmitDelta | FinishRequest | FailRequest | ClientGone | SnapshotEffect
)
