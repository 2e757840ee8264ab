"""Messages between an edge process and its core: one kind of frame per direction, each with everything that
one side sends in one iteration of its event loop.

A step of the engine brings a delta to hundreds of streams, so the cost of a message must be shared by all of
them: one frame, one write, and one decoding call that creates the values that sinks take. Both ends are of
one release on one machine, so that versions need no negotiation, and clock readings are comparable.

A frame is its length (4 bytes, little endian) and a MessagePack array.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec

from kvasir.core.errors import (
    CapacityError,
    KvasirError,
    ProtocolError,
    RequestError,
    TransferError,
    UpstreamError,
)
from kvasir.core.requests import Delta, Request
from kvasir.core.values import retyped
from kvasir.ports.limits import Grant, LimitRefusal, Quota
from kvasir.ports.responses import StoredResponse
from kvasir.ports.router import BrownoutView, RequestSummary, ServedAdapter

MAX_FRAME_BYTES = 64 << 20
"""Larger messages are split into several frames. The sender refuses a single item that is larger."""

_LENGTH = struct.Struct("<I")

if TYPE_CHECKING:
    LinkDelta = Delta
    LinkRequest = Request
else:
    # `array[int]` is a type for type checkers only, so the decoder knows these fields as `array`.
    LinkDelta = retyped(Delta, embedding=array | None)
    LinkRequest = retyped(Request, tokens=array, block_hashes=array)


class ErrorNote(msgspec.Struct, frozen=True, array_like=True):
    """A KvasirError: `kind` names its class."""

    kind: str
    code: str
    message: str
    status: int = 400
    param: str | None = None
    retry_after_s: float = 1.0


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request, successful if `error` is None."""

    summary: RequestSummary
    error: ErrorNote | None = None


class LimitRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request to the rate limits; its response has the same `number`."""

    number: int
    tenant: str
    quota: Quota
    tokens: int


class LimitResponse(msgspec.Struct, frozen=True, array_like=True):
    """The response: exactly one of the two is set."""

    number: int
    grant: Grant | None = None
    refusal: LimitRefusal | None = None


class LimitSettled(msgspec.Struct, frozen=True, array_like=True):
    """The end of the grant of request `number`, with the tokens used; None if the request never ran."""

    number: int
    tokens: int | None


class PageRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request for a page that only the core can render."""

    number: int
    method: str
    path: str
    body: bytes


class PageResponse(msgspec.Struct, frozen=True, array_like=True):
    """The page. `headers` are whole lines."""

    number: int
    status: int
    content_type: bytes
    headers: bytes
    body: bytes


class ResponseKept(msgspec.Struct, frozen=True, array_like=True):
    """A response of the Responses API to store."""

    response: StoredResponse


class ResponseAsked(msgspec.Struct, frozen=True, array_like=True):
    """A request to the store of responses, to `find`, `cancel` or `remove` one; its answer has the same
    `number`."""

    number: int
    act: Literal["find", "cancel", "remove"]
    tenant: str
    name: str


class ResponseFound(msgspec.Struct, frozen=True, array_like=True):
    """The answer: the response, None for none."""

    number: int
    response: StoredResponse | None


class CoreStatus(msgspec.Struct, frozen=True, array_like=True):
    """The state of admission: the reason why clients may not send requests (None: they may), the reason why
    no request could be served immediately, in total and per model, the brown-out of each model, the adapters
    that were loaded at run time, and the share of each canary by route."""

    refusing: str | None
    missing: str | None
    missing_by_model: dict[str, str | None]
    brownouts: dict[str, BrownoutView]
    adapters: dict[str, ServedAdapter] = {}
    shares: dict[str, float] = {}


class EdgeWelcome(msgspec.Struct, frozen=True, array_like=True):
    """The core's first message: the deployment as JSON, where to listen (host, port), also for the
    console if it has a port of its own, and the secret from which cache salts are derived, so that a tenant
    has the same salts on every edge."""

    deployment: bytes
    addresses: list[tuple[str, int]]
    cache_secret: bytes = b""
    console: list[tuple[str, int]] = []


class ToCore(msgspec.Struct, array_like=True):
    """From an edge. Submitted requests are processed before cancelled ones, and `kept` responses before
    requests for `responses`. `named` maps calls, by the
    client's id, to their requests. `started` is the address where it listens, sent once; `failed` is the
    reason why it cannot. `figures` are its metrics, with the number of the scrape, and `beat` echoes the
    core's heartbeat."""

    submits: list[LinkRequest] = []
    cancels: list[str] = []
    named: list[tuple[str, tuple[str, ...]]] = []
    takes: list[LimitRequest] = []
    settled: list[LimitSettled] = []
    asks: list[PageRequest] = []
    kept: list[ResponseKept] = []
    responses: list[ResponseAsked] = []
    figures: list[tuple[int, bytes]] = []
    started: tuple[str, int] | None = None
    failed: ErrorNote | None = None
    beat: int = 0


class ToEdge(msgspec.Struct, array_like=True):
    """From the core. All deltas of an iteration precede all ends, which does not change the order within a
    request, and precede all `fast_path` items, each of which is a SessionResponse of deltas that directly
    continue their streams. `stopped` are ids of background responses that were cancelled. Numbers in
    `scrapes` request the edge's metrics."""

    deltas: list[LinkDelta] = []
    fast_path: list[bytes] = []
    ends: list[Ended] = []
    leaves: list[LimitResponse] = []
    shown: list[PageResponse] = []
    found: list[ResponseFound] = []
    stopped: list[str] = []
    scrapes: list[int] = []
    core_status: CoreStatus | None = None
    welcome: EdgeWelcome | None = None
    drain: bool = False
    beat: int = 0


Frame = TypeVar("Frame", bound=ToCore | ToEdge)

_KINDS: dict[str, type[KvasirError]] = {
    kind.__name__: kind for kind in (KvasirError, UpstreamError, TransferError, ProtocolError)
}


def note_of(error: KvasirError) -> ErrorNote:
    """An error in a form from which the other side can rebuild it."""
    if isinstance(error, RequestError):
        return ErrorNote("RequestError", error.code, error.message, error.status, error.param)
    if isinstance(error, CapacityError):
        return ErrorNote("CapacityError", error.code, error.message, retry_after_s=error.retry_after_s)
    return ErrorNote(type(error).__name__, error.code, error.message)


def error_of(note: ErrorNote) -> KvasirError:
    """Rebuild the error that `note_of` was given. An error of a class that clients never see becomes a
    KvasirError."""
    if note.kind == "RequestError":
        return RequestError(note.message, status=note.status, code=note.code, param=note.param)
    if note.kind == "CapacityError":
        return CapacityError(note.message, code=note.code, retry_after_s=note.retry_after_s)
    return _KINDS.get(note.kind, KvasirError)(note.message, code=note.code)


def plain(value: Any) -> bytes:
    """Encode arrays, which the encoder does not support, as their type code and bytes."""
    if isinstance(value, array):
        return value.typecode.encode() + value.tobytes()
    raise NotImplementedError(type(value))


def plain_array(kind: type, value: Any) -> Any:
    """Decode the output of `plain`. Raise ValueError for anything else."""
    if kind is not array or not isinstance(value, bytes) or value[:1] not in (b"I", b"Q", b"f"):
        raise ValueError("no array")
    made = array(chr(value[0]))
    made.frombytes(value[1:])
    return made


_encode = msgspec.msgpack.Encoder(enc_hook=plain).encode


def frames(message: ToCore | ToEdge, refuse: Callable[[ToCore | ToEdge], None]) -> Iterator[bytes]:
    """Encode `message` in as few frames as possible. An item that is too large for a frame is passed to
    `refuse`, alone in a message."""
    body = _encode(message)
    if len(body) <= MAX_FRAME_BYTES:
        yield _LENGTH.pack(len(body)) + body
    elif (parts := _halves(message)) is None:
        refuse(message)
    else:
        for part in parts:
            yield from frames(part, refuse)


def _halves(message: Frame) -> tuple[Frame, Frame] | None:
    """Split a message into two that have the same effect one after the other; None for a single item."""
    kind = type(message)
    fields = {name: getattr(message, name) for name in kind.__struct_fields__}
    lists = {name: value for name, value in fields.items() if isinstance(value, list)}
    items = [(name, item) for name, value in lists.items() for item in value]
    if len(items) < 2:
        return None
    first, second = kind(), kind()
    for name in fields.keys() - lists.keys():
        setattr(first, name, fields[name])
    for at, (name, item) in enumerate(items):
        getattr(first if at < len(items) // 2 else second, name).append(item)
    return first, second


class Frames(Generic[Frame]):
    """Splits received bytes into frames of one kind. Buffers less than one frame."""

    def __init__(self, kind: type[Frame]) -> None:
        self._decode: Callable[[memoryview], Frame] = msgspec.msgpack.Decoder(
            kind, dec_hook=plain_array
        ).decode
        self._held = bytearray()

    def take(self, data: bytes) -> list[Frame]:
        """Return all frames that are complete with `data`. Raise ProtocolError for a malformed one."""
        held = self._held
        held += data
        made: list[Frame] = []
        at = 0
        try:
            with memoryview(held) as view:
                while len(held) - at >= _LENGTH.size:
                    (size,) = _LENGTH.unpack_from(held, at)
                    if size > MAX_FRAME_BYTES:
                        raise ProtocolError(f"frame of {size} bytes exceeds the limit of {MAX_FRAME_BYTES}")
                    begin = at + _LENGTH.size
                    if len(held) < begin + size:
                        break
                    at = begin + size
                    with view[begin:at] as body:
                        made.append(self._decode(body))
        except (msgspec.DecodeError, ValueError) as error:
            raise ProtocolError(f"received an invalid frame: {error}") from error
        del held[:at]
        return made
