"""Everything that goes over a session to protobuf and back: the only other spelling of the messages.

Whatever a peer can get wrong ends in ProtocolError here, and so does a value of our own that does not fit
its field: nothing behind the codec sees half a message, and nothing but ProtocolError leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from google.protobuf.message import DecodeError, EncodeError

from kvasir.core.errors import ProtocolError
from kvasir.core.golden import GoldenPrompt
from kvasir.core.identity import Hardware, KvLayout, WorkerIdentity
from kvasir.core.kv import KvSnapshotPart
from kvasir.core.messages import (
    Abort,
    Draining,
    EncodedStep,
    Goodbye,
    Hello,
    ReleaseLeases,
    RouterFrame,
    RouterMessage,
    Serving,
    SetDraining,
    Submit,
    Welcome,
    WorkerFrame,
    WorkerMessage,
)
from kvasir.core.requests import Role, StepBatch
from kvasir.wire.requests import decode_enum, decode_request, encode_request
from kvasir.wire.steps import decode_step_batch, encode_step_batch
from kvasir.wire.v1 import identity_pb2, kv_pb2, session_pb2

P = ParamSpec("P")
T = TypeVar("T")

SERVICE: str = session_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
"""Full name of the gRPC service; its methods are `Session` and `Snapshot`."""

_ROLE_TO_PB = {
    Role.PREFILL: identity_pb2.ROLE_PREFILL,
    Role.DECODE: identity_pb2.ROLE_DECODE,
    Role.BOTH: identity_pb2.ROLE_BOTH,
    Role.EMBED: identity_pb2.ROLE_EMBED,
}
_ROLE: dict[int, Role] = {value: role for role, value in _ROLE_TO_PB.items()}


def _strict(function: Callable[P, T]) -> Callable[P, T]:
    """Let only ProtocolError out."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (DecodeError, EncodeError, ValueError, TypeError, OverflowError) as error:
            raise ProtocolError(f"{function.__name__}: {error}") from error

    return checked


@_strict
def encode_to_worker(message: Hello | RouterFrame) -> bytes:
    """A router's message as the bytes of a `SessionRequest`. Raises ProtocolError."""
    m = session_pb2.SessionRequest()
    if isinstance(message, RouterFrame):
        m.frame.seq, m.frame.ack = message.seq, message.ack
        _encode_router_payload(message.payload, m.frame)
    else:
        m.hello.SetInParent()
        m.hello.router_id = message.router_id
        m.hello.session_id = message.session_id
        m.hello.received_seq = message.received_seq
        m.hello.protocol_version = message.protocol_version
    encoded: bytes = m.SerializeToString()
    return encoded


@_strict
def decode_to_worker(data: bytes) -> Hello | RouterFrame:
    """The opposite of encode_to_worker. Raises ProtocolError."""
    m = session_pb2.SessionRequest.FromString(data)
    match m.WhichOneof("message"):
        case "frame":
            return RouterFrame(m.frame.seq, m.frame.ack, _decode_router_payload(m.frame))
        case "hello":
            return Hello(
                router_id=m.hello.router_id,
                session_id=m.hello.session_id,
                received_seq=m.hello.received_seq,
                protocol_version=m.hello.protocol_version,
            )
    raise ProtocolError("a message of no known kind")


@_strict
def encode_to_router(message: Welcome | WorkerFrame) -> bytes:
    """A worker's message as the bytes of a `SessionResponse`. Raises ProtocolError."""
    m = session_pb2.SessionResponse()
    if isinstance(message, WorkerFrame):
        frame = m.frame
        frame.seq, frame.ack = message.seq, message.ack
        _encode_worker_payload(message.payload, frame)
    else:
        m.welcome.SetInParent()
        m.welcome.session_id = message.session_id
        m.welcome.resumed = message.resumed
        m.welcome.received_seq = message.received_seq
        m.welcome.identity.CopyFrom(encode_identity(message.identity))
    encoded: bytes = m.SerializeToString()
    return encoded


@_strict
def decode_to_router(data: bytes) -> Welcome | WorkerFrame:
    """The opposite of encode_to_router, but that a step is left as a EncodedStep. Raises ProtocolError."""
    m = session_pb2.SessionResponse.FromString(data)
    match m.WhichOneof("message"):
        case "frame":
            frame = m.frame
            return WorkerFrame(frame.seq, frame.ack, _decode_worker_payload(frame, data))
        case "welcome":
            return Welcome(
                session_id=m.welcome.session_id,
                resumed=m.welcome.resumed,
                received_seq=m.welcome.received_seq,
                identity=decode_identity(m.welcome.identity),
            )
    raise ProtocolError("a message of no known kind")


def _encode_router_payload(payload: RouterMessage | None, frame: Any) -> None:
    match payload:
        case Submit(requests=requests):
            frame.submit.SetInParent()
            frame.submit.requests.extend(map(encode_request, requests))
        case Abort(request_ids=ids):
            frame.abort.SetInParent()
            frame.abort.request_ids.extend(ids)
        case ReleaseLeases(lease_ids=ids):
            frame.release_leases.SetInParent()
            frame.release_leases.lease_ids.extend(ids)
        case Goodbye():
            frame.goodbye.SetInParent()
        case SetDraining(draining=draining, reason=reason, grace_s=grace_s):
            frame.set_draining.SetInParent()
            frame.set_draining.draining = draining
            frame.set_draining.reason = reason
            frame.set_draining.grace_s = grace_s
        case None:
            frame.SetInParent()


def _decode_router_payload(frame: Any) -> RouterMessage | None:
    match frame.WhichOneof("payload"):
        case "submit":
            return Submit(tuple(map(decode_request, frame.submit.requests)))
        case "abort":
            return Abort(tuple(frame.abort.request_ids))
        case "release_leases":
            return ReleaseLeases(tuple(frame.release_leases.lease_ids))
        case "goodbye":
            return Goodbye()
        case "set_draining":
            desired = frame.set_draining
            return SetDraining(desired.draining, desired.reason, desired.grace_s)
    return None


def _encode_worker_payload(payload: WorkerMessage | EncodedStep | None, frame: Any) -> None:
    match payload:
        case StepBatch():
            encode_step_batch(payload, frame.step_batch)
        case EncodedStep(decode=decode):
            encode_step_batch(decode(None), frame.step_batch)
        case Draining(reason=reason, grace_s=grace_s):
            frame.draining.SetInParent()
            frame.draining.reason = reason
            frame.draining.grace_s = grace_s
        case Serving():
            frame.serving.SetInParent()
        case None:
            frame.SetInParent()


@_strict
def _decode_step(batch: Any, positions: Sequence[int] | None) -> StepBatch:
    return decode_step_batch(batch, positions)


def _decode_worker_payload(frame: Any, data: bytes) -> WorkerMessage | EncodedStep | None:
    match frame.WhichOneof("payload"):
        case "step_batch":
            return EncodedStep(data, partial(_decode_step, frame.step_batch))
        case "draining":
            return Draining(frame.draining.reason, frame.draining.grace_s)
        case "serving":
            return Serving()
    return None


def encode_identity(identity: WorkerIdentity) -> Any:
    """`WorkerIdentity` as its message."""
    kv = identity.kv
    return identity_pb2.WorkerIdentity(
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        pool=identity.pool,
        role=_ROLE_TO_PB[identity.role],
        model=identity.model,
        revision=identity.revision,
        tokenizer_digest=identity.tokenizer_digest,
        max_model_len=identity.max_model_len,
        kv=identity_pb2.KvLayout(
            block_size=kv.block_size,
            dtype=kv.dtype,
            layout=kv.layout,
            layers=kv.layers,
            kv_heads=kv.kv_heads,
            head_size=kv.head_size,
            bytes_per_block=kv.bytes_per_block,
            tensor_parallel_size=kv.tensor_parallel_size,
        ),
        kv_blocks=identity.kv_blocks,
        engine=identity.engine,
        engine_version=identity.engine_version,
        transfer=identity.transfer,
        adapters=identity.adapters,
        data_parallel_size=identity.data_parallel_size,
        protocol_version=identity.protocol_version,
        hash_version=identity.hash_version,
        reports_kv=identity.reports_kv,
        golden=[
            identity_pb2.GoldenPrompt(name=each.name, text=each.text, tokens=each.tokens, chain=each.chain)
            for each in identity.golden
        ],
        hardware=identity_pb2.Hardware(
            device=identity.hardware.device,
            devices=identity.hardware.devices,
            flops=identity.hardware.flops,
            bytes_per_s=identity.hardware.bytes_per_s,
        ),
        model_parameters=identity.model_parameters,
        model_bytes=identity.model_bytes,
        shared_tier=identity.shared_tier,
    )


def decode_identity(m: Any) -> WorkerIdentity:
    """The identity in a Welcome. Raises ProtocolError for an unknown role."""
    kv = m.kv
    return WorkerIdentity(
        worker_id=m.worker_id,
        epoch=m.epoch,
        pool=m.pool,
        role=decode_enum(_ROLE, m.role, "role"),
        model=m.model,
        revision=m.revision,
        tokenizer_digest=m.tokenizer_digest,
        max_model_len=m.max_model_len,
        kv=KvLayout(
            block_size=kv.block_size,
            dtype=kv.dtype,
            layout=kv.layout,
            layers=kv.layers,
            kv_heads=kv.kv_heads,
            head_size=kv.head_size,
            bytes_per_block=kv.bytes_per_block,
            tensor_parallel_size=kv.tensor_parallel_size,
        ),
        kv_blocks=m.kv_blocks,
        engine=m.engine,
        engine_version=m.engine_version,
        transfer=m.transfer,
        adapters=tuple(m.adapters),
        data_parallel_size=m.data_parallel_size,
        protocol_version=m.protocol_version,
        hash_version=m.hash_version,
        reports_kv=m.reports_kv,
        golden=tuple(GoldenPrompt(each.name, each.text, each.tokens, each.chain) for each in m.golden),
        hardware=Hardware(m.hardware.device, m.hardware.devices, m.hardware.flops, m.hardware.bytes_per_s),
        model_parameters=m.model_parameters,
        model_bytes=m.model_bytes,
        shared_tier=m.shared_tier,
    )


@_strict
def encode_snapshot_request(epoch: int) -> bytes:
    """The bytes of a `SnapshotRequest`. Raises ProtocolError."""
    encoded: bytes = kv_pb2.SnapshotRequest(epoch=epoch).SerializeToString()
    return encoded


@_strict
def decode_snapshot_request(data: bytes) -> int:
    """The epoch that a router knows, 0 for none. Raises ProtocolError."""
    epoch: int = kv_pb2.SnapshotRequest.FromString(data).epoch
    return epoch


@_strict
def encode_snapshot_part(part: KvSnapshotPart) -> bytes:
    """The bytes of a `SnapshotResponse`. Raises ProtocolError."""
    encoded: bytes = kv_pb2.SnapshotResponse(
        epoch=part.epoch, sequence=part.sequence, log=part.log, last=part.last
    ).SerializeToString()
    return encoded


@_strict
def decode_snapshot_part(data: bytes) -> KvSnapshotPart:
    """The opposite of encode_snapshot_part. Raises ProtocolError."""
    m = kv_pb2.SnapshotResponse.FromString(data)
    return KvSnapshotPart(epoch=m.epoch, sequence=m.sequence, log=m.log, last=m.last)
