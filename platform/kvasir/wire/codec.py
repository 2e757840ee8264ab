"""Session messages to protobuf bytes and back. No other module serializes them.

A malformed message from a peer raises ProtocolError, and so does a value that does not fit its field. The
codec raises no other error and returns no partial message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from google.protobuf.message import DecodeError, EncodeError

from kvasir.core.adapters import HeldAdapter
from kvasir.core.errors import ProtocolError
from kvasir.core.golden import GoldenPrompt
from kvasir.core.identity import Hardware, KvLayout, WorkerIdentity
from kvasir.core.kv import KvSnapshotPart
from kvasir.core.locality import Locality, Nic, NicProtocol
from kvasir.core.messages import (
    Abort,
    AdapterAnswer,
    AdaptersHeld,
    Draining,
    EncodedStep,
    Goodbye,
    Hello,
    LoadAdapter,
    ReleaseLeases,
    RouterFrame,
    Serving,
    SetDraining,
    Submit,
    UnloadAdapter,
    Welcome,
    WorkerFrame,
)
from kvasir.core.model.work import AttentionWork, ModelWork
from kvasir.core.requests import Role, StepBatch
from kvasir.wire.mapping import MessageConverter, enum, message
from kvasir.wire.requests import REQUEST
from kvasir.wire.steps import decode_step_batch, encode_step_batch
from kvasir.wire.v1 import adapters_pb2, identity_pb2, kv_pb2, session_pb2

P = ParamSpec("P")
T = TypeVar("T")

SERVICE: str = session_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
"""Full name of the gRPC service; its methods are `Session` and `Snapshot`."""

_NIC = message(Nic, identity_pb2.Nic, protocol=enum("protocol", NicProtocol, identity_pb2.NicProtocol))
_IDENTITY = message(
    WorkerIdentity,
    identity_pb2.WorkerIdentity,
    role=enum("role", Role, identity_pb2.Role),
    kv=message(KvLayout, identity_pb2.KvLayout),
    golden=message(GoldenPrompt, identity_pb2.GoldenPrompt),
    hardware=message(Hardware, identity_pb2.Hardware),
    locality=message(Locality, identity_pb2.Locality, nics=_NIC),
    work=message(
        ModelWork,
        identity_pb2.ModelWork,
        attention=message(AttentionWork, identity_pb2.AttentionWork),
    ),
)
_HELLO = message(Hello, session_pb2.Hello)
_WELCOME = message(Welcome, session_pb2.Welcome, identity=_IDENTITY)
_SNAPSHOT_PART = message(KvSnapshotPart, kv_pb2.SnapshotResponse)

_PAYLOADS: dict[type[Any], tuple[str, MessageConverter[Any]]] = {
    Submit: ("submit", message(Submit, session_pb2.Submit, requests=REQUEST)),
    Abort: ("abort", message(Abort, session_pb2.Abort)),
    ReleaseLeases: ("release_leases", message(ReleaseLeases, session_pb2.ReleaseLeases)),
    Goodbye: ("goodbye", message(Goodbye, session_pb2.Goodbye)),
    SetDraining: ("set_draining", message(SetDraining, session_pb2.SetDraining)),
    Draining: ("draining", message(Draining, session_pb2.Draining)),
    Serving: ("serving", message(Serving, session_pb2.Serving)),
    LoadAdapter: ("load_adapter", message(LoadAdapter, adapters_pb2.LoadAdapter)),
    UnloadAdapter: ("unload_adapter", message(UnloadAdapter, adapters_pb2.UnloadAdapter)),
    AdaptersHeld: (
        "adapters_held",
        message(
            AdaptersHeld,
            adapters_pb2.AdaptersHeld,
            adapters=message(HeldAdapter, adapters_pb2.HeldAdapter),
        ),
    ),
    AdapterAnswer: ("adapter_answer", message(AdapterAnswer, adapters_pb2.AdapterAnswer)),
}
"""By class, the field of a frame's `payload` and its converter; step batches have functions of their own."""
_CONVERTERS = dict(_PAYLOADS.values())


def _strict(function: Callable[P, T]) -> Callable[P, T]:
    """Convert the errors of protobuf to ProtocolError."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (DecodeError, EncodeError, ValueError, TypeError, OverflowError) as error:
            raise ProtocolError(f"{function.__name__}: {error}") from error

    return checked


@_strict
def encode_to_worker(message: Hello | RouterFrame) -> bytes:
    """Encode a router's message as a `SessionRequest`. Raises ProtocolError."""
    m = session_pb2.SessionRequest()
    if isinstance(message, RouterFrame):
        _encode_frame(message, m.frame)
    else:
        _HELLO.fill(m.hello, message)
    encoded: bytes = m.SerializeToString()
    return encoded


@_strict
def decode_to_worker(data: bytes) -> Hello | RouterFrame:
    """Decode a `SessionRequest`. Raises ProtocolError."""
    m = session_pb2.SessionRequest.FromString(data)
    match m.WhichOneof("message"):
        case "frame":
            return RouterFrame(m.frame.seq, m.frame.ack, _decode_payload(m.frame))
        case "hello":
            return _HELLO.decode(m.hello)
    raise ProtocolError("a message of no known kind")


@_strict
def encode_to_router(message: Welcome | WorkerFrame) -> bytes:
    """Encode a worker's message as a `SessionResponse`. Raises ProtocolError."""
    m = session_pb2.SessionResponse()
    if isinstance(message, WorkerFrame):
        _encode_frame(message, m.frame)
    else:
        _WELCOME.fill(m.welcome, message)
    encoded: bytes = m.SerializeToString()
    return encoded


@_strict
def decode_to_router(data: bytes) -> Welcome | WorkerFrame:
    """Decode a `SessionResponse`; a step is returned as an EncodedStep. Raises ProtocolError."""
    m = session_pb2.SessionResponse.FromString(data)
    match m.WhichOneof("message"):
        case "frame":
            frame = m.frame
            if frame.HasField("step_batch"):
                step = EncodedStep(data, partial(_decode_step, frame.step_batch))
                return WorkerFrame(frame.seq, frame.ack, step)
            return WorkerFrame(frame.seq, frame.ack, _decode_payload(frame))
        case "welcome":
            return _WELCOME.decode(m.welcome)
    raise ProtocolError("a message of no known kind")


def _encode_frame(message: RouterFrame | WorkerFrame, frame: Any) -> None:
    frame.SetInParent()
    frame.seq, frame.ack = message.seq, message.ack
    match message.payload:
        case StepBatch() as batch:
            encode_step_batch(batch, frame.step_batch)
        case EncodedStep(decode=decode):
            encode_step_batch(decode(None), frame.step_batch)
        case None:
            pass
        case payload:
            field, converter = _PAYLOADS[type(payload)]
            converter.fill(getattr(frame, field), payload)


def _decode_payload(frame: Any) -> Any:
    field = frame.WhichOneof("payload")
    return None if field is None else _CONVERTERS[field].decode(getattr(frame, field))


@_strict
def _decode_step(batch: Any, positions: Sequence[int] | None) -> StepBatch:
    return decode_step_batch(batch, positions)


@_strict
def encode_snapshot_request(epoch: int) -> bytes:
    """Encode a `SnapshotRequest`. Raises ProtocolError."""
    encoded: bytes = kv_pb2.SnapshotRequest(epoch=epoch).SerializeToString()
    return encoded


@_strict
def decode_snapshot_request(data: bytes) -> int:
    """Decode a `SnapshotRequest` to the epoch that the router knows, 0 for none. Raises ProtocolError."""
    epoch: int = kv_pb2.SnapshotRequest.FromString(data).epoch
    return epoch


@_strict
def encode_snapshot_part(part: KvSnapshotPart) -> bytes:
    """Encode a `SnapshotResponse`. Raises ProtocolError."""
    encoded: bytes = _SNAPSHOT_PART.encode(part).SerializeToString()
    return encoded


@_strict
def decode_snapshot_part(data: bytes) -> KvSnapshotPart:
    """Decode a `SnapshotResponse`. Raises ProtocolError."""
    return _SNAPSHOT_PART.decode(kv_pb2.SnapshotResponse.FromString(data))
