"""What the request machine is told, and what it wants done: its whole conversation with the world.

Both are frozen values, so that a history can be written down and replayed. A worker is named by the id
under which its session is known, which is its endpoint's.
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
    """A client's request. The only event that `handle` may refuse, by raising."""

    request: Request


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client is gone, or was cut off. `outcome` is the summary's."""

    request_id: str
    outcome: str = "client_closed"


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A session is up. With the identity that is known already it is the same session, resumed: its
    legs go on."""

    worker_id: str
    identity: WorkerIdentity


@dataclass(frozen=True, slots=True)
class WorkerInterrupted:
    """The connection broke and may be resumed: its legs go on, and nothing new is sent."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """The worker takes nothing new; its legs go on."""

    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerRestored:
    """The worker drains no longer."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The session is over, and all that ran in it."""

    worker_id: str
    reason: str


@value
class StepReceived:
    """One message of a worker."""

    worker_id: str
    batch: StepBatch


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A part of what FetchSnapshot asked for, in order."""

    worker_id: str
    attempt: int
    part: KvSnapshotPart


@dataclass(frozen=True, slots=True)
class SnapshotEnded:
    """The call for a snapshot is over: well, or with an error that says whether it is of no use to ask
    again (`final`)."""

    worker_id: str
    attempt: int
    error: str | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class TimerTick:
    """Time has passed; due whenever `next_wakeup` is reached."""


@dataclass(frozen=True, slots=True)
class ShuttingDown:
    """The router stops: every request ends with `shutting_down`."""


@dataclass(frozen=True, slots=True)
class PlanReceived:
    """What the planner says: the roles of workers that do another part of the work than their pool's, and in
    how many seconds there may be workers, while there are none; None where that is not known."""

    roles: Mapping[str, Role]
    ready_in_s: float | None = None


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
    | ShuttingDown
)


@value
class SubmitTo:
    """Start a leg on a worker."""

    worker_id: str
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class AbortOn:
    """Stop legs on a worker."""

    worker_id: str
    leg_ids: tuple[str, ...]


@value
class ReleaseOn:
    """End leases on a worker; harmless where they have ended by themselves."""

    worker_id: str
    lease_ids: tuple[str, ...]


@value
class EmitDelta:
    """Pass a delta on to the client. Its `request_id` is the client's."""

    request_id: str
    delta: Delta


@value
class FinishRequest:
    """The request ended well; nothing follows."""

    request_id: str
    summary: RequestSummary


@dataclass(frozen=True, slots=True)
class FailRequest:
    """The request ended badly; nothing follows."""

    request_id: str
    error: KvasirError
    summary: RequestSummary


@dataclass(frozen=True, slots=True)
class ClientGone:
    """A cancelled request ended; only observers are told."""

    request_id: str
    summary: RequestSummary


SnapshotEffect = FetchSnapshot | CancelSnapshot
Effect = (
    SubmitTo | AbortOn | ReleaseOn | EmitDelta | FinishRequest | FailRequest | ClientGone | SnapshotEffect
)
