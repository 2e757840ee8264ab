"""The messages of a session between router and worker, independent of their encoding.

A session is one logical, ordered, exactly-once conversation between a router and a worker. It outlives
its connections: every frame has a sequence number, both sides keep a bounded tail of unacknowledged
frames, and a new connection replays it. `kvasir.core.session_link` implements this, `kvasir.wire` is the
encoding, and proto/kvasir/wire/v1 the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.core.adapters import HeldAdapter
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

    `resumed` False means a new session: the worker holds no state of an earlier one, whose legs were
    aborted. `received_seq` is the last router frame that the worker has processed.
    """

    session_id: str
    resumed: bool
    received_seq: int
    identity: WorkerIdentity


@value
class Submit:
    """Start these legs. One message carries all legs that were admitted in one tick."""

    requests: tuple[EngineRequest, ...]


@value
class Abort:
    """Stop these legs. Each live one ends with a last delta."""

    request_ids: tuple[str, ...]


@value
class ReleaseLeases:
    """Free KV that was offered and will not be pulled."""

    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The router ends the session and does not resume it. Its legs are aborted."""


@dataclass(frozen=True, slots=True)
class Draining:
    """The worker accepts no new legs. Running legs end within `grace_s` seconds; 0 means no bound."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class Serving:
    """The worker accepts legs again."""


@dataclass(frozen=True, slots=True)
class SetDraining:
    """An operator's command to drain, or to serve again. The worker notifies all its routers. A stopping
    worker continues to drain."""

    draining: bool
    reason: str = ""
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load a LoRA adapter; see HeldAdapter. The worker answers with the same `number`, after it has reported
    the adapter. A `digest` that is not "" is that of the files it must find. An adapter that it holds with
    the same source is loaded already."""

    number: int
    name: str
    source: str
    replicas: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Remove a LoRA adapter. The worker reports it as retiring at once, and answers when the requests that
    use it have ended and it is removed. An adapter that it does not hold is removed already."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class AdaptersHeld:
    """All adapters that the worker has loaded at run time: at the begin of a session, and on every change."""

    adapters: tuple[HeldAdapter, ...]


@dataclass(frozen=True, slots=True)
class AdapterAnswer:
    """The result of order `number`. `code` is "" if it was carried out, else a stable error code with its
    HTTP status and message."""

    number: int
    code: str = ""
    message: str = ""
    status: int = 0


AdapterOrder = LoadAdapter | UnloadAdapter
AdapterReport = AdaptersHeld | AdapterAnswer
RouterMessage = Submit | Abort | ReleaseLeases | Goodbye | SetDraining | AdapterOrder
WorkerMessage = StepBatch | Draining | Serving | AdapterReport


@value
class EncodedStep:
    """A received StepBatch, valid but not decoded, because some of its deltas can be served from the bytes of
    `frame`. `decode(positions)` returns a batch with the deltas at these positions, or with all deltas if
    None, and everything else. It raises ProtocolError."""

    frame: bytes
    decode: Callable[[Sequence[int] | None], StepBatch]


@value
class RouterFrame:
    """Router to worker. `seq` counts payloads from 1; a frame without payload acknowledges, or says only that
    its sender is alive, and repeats the last seq. `ack` is the last worker seq processed."""

    seq: int
    ack: int
    payload: RouterMessage | None = None


@value
class WorkerFrame:
    """Worker to router, with the fields of RouterFrame."""

    seq: int
    ack: int
    payload: WorkerMessage | EncodedStep | None = None
