"""What router and worker say to each other on a session, free of any encoding.

A session is one logical, ordered, exactly-once conversation between a router and a worker. It outlives
the connections that carry it: every frame has a sequence number, both sides keep a bounded tail of
what the other has not acknowledged, and a new connection replays it. `kvasir.core.session_link` is that
bookkeeping; `kvasir.wire` the encoding; proto/kvasir/wire/v1 the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.core.identity import PROTOCOL_VERSION, WorkerIdentity
from kvasir.core.requests import EngineRequest, StepBatch
from kvasir.core.values import value


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of every connection, from the router (unsequenced).

    `session_id` is "" for a new session, else the one to resume; `received_seq` is the last
    worker frame that the router has processed in it.
    """

    router_id: str
    session_id: str = ""
    received_seq: int = 0
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Welcome:
    """The worker's answer (unsequenced).

    `resumed` False means: a new session, nothing of an earlier one is held, and whatever ran there
    was aborted. `received_seq` is the last router frame that the worker has processed.
    """

    session_id: str
    resumed: bool
    received_seq: int
    identity: WorkerIdentity


@value
class Submit:
    """Start these legs. One message carries all that were admitted in one tick."""

    requests: tuple[EngineRequest, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop these legs; each live one answers with a last delta."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReleaseLeases:
    """Free KV that was offered and will not be pulled."""

    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The router ends the session: what runs in it is not wanted, and it will not come back."""


@dataclass(frozen=True, slots=True)
class Draining:
    """The worker takes no new legs. Those it has come to their end, within `grace_s` seconds unless 0."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class Serving:
    """The worker takes legs again."""


@dataclass(frozen=True, slots=True)
class SetDraining:
    """An operator wants the worker to drain, or to serve again: it tells all its routers. One that is being
    stopped goes on draining."""

    draining: bool
    reason: str = ""
    grace_s: float = 0.0


RouterMessage = Submit | Abort | ReleaseLeases | Goodbye | SetDraining
WorkerMessage = StepBatch | Draining | Serving


@value
class EncodedStep:
    """A StepBatch as it came, valid but not yet taken apart: some of its deltas may be served from the bytes
    of its `frame`. `decode(positions)` makes a batch of the deltas at these positions and of all else; None:
    of all of it. It raises ProtocolError."""

    frame: bytes
    decode: Callable[[Sequence[int] | None], StepBatch]


@value
class RouterFrame:
    """Router to worker. `seq` counts payloads from 1; a frame without payload only acknowledges
    and repeats the last seq. `ack` is the last worker seq processed."""

    seq: int
    ack: int
    payload: RouterMessage | None = None


@value
class WorkerFrame:
    """Worker to router; as RouterFrame, in the other direction."""

    seq: int
    ack: int
    payload: WorkerMessage | EncodedStep | None = None
