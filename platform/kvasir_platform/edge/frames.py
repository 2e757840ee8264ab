"""What an edge process and its core tell each other: two kinds of frames, each with all that one side has to
say after one turn of its loop.

A step of the engine brings a delta to hundreds of streams, so what a message costs has to be shared by all of
them: one frame, one write, and decoding in one call that makes the very values that sinks take. Both ends are
of one release and one machine, so that nothing here negotiates versions, and a clock's reading on one side is
one on the other.

A frame is its length (4 bytes, little endian) and a MessagePack array.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator
from dataclasses import field, make_dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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
from kvasir.ports.limits import Grant, LimitRefusal, Quota
from kvasir.ports.router import BrownoutView, RequestSummary

MAX_FRAME_BYTES = 64 << 20
"""What is more goes in several frames; a thing that is larger by itself is refused by its sender."""

_LENGTH = struct.Struct("<I")

if TYPE_CHECKING:
    LinkDelta = Delta
    LinkRequest = Request
else:
    # `array[int]` is a type to type checkers only, so the decoder is told of arrays in its own words; all
    # other fields are those of the values.
    LinkDelta = make_dataclass(
        "LinkDelta", [("embedding", array | None, None)], bases=(Delta,), slots=True, unsafe_hash=True
    )
    LinkRequest = make_dataclass(
        "LinkRequest",
        [("tokens", array), ("block_hashes", array, field(default_factory=lambda: array("Q"), repr=False))],
        bases=(Request,),
        slots=True,
        unsafe_hash=True,
    )


class ErrorNote(msgspec.Struct, frozen=True, array_like=True):
    """A KvasirError: `kind` names its class."""

    kind: str
    code: str
    message: str
    status: int = 400
    param: str | None = None
    retry_after_s: float = 1.0


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """A request's end, well where `error` is None."""

    summary: RequestSummary
    error: ErrorNote | None = None


class LimitRequest(msgspec.Struct, frozen=True, array_like=True):
    """A question to the rate limits; its answer has the same `number`."""

    number: int
    tenant: str
    quota: Quota
    tokens: int


class LimitResponse(msgspec.Struct, frozen=True, array_like=True):
    """The answer: exactly one of the two."""

    number: int
    grant: Grant | None = None
    refusal: LimitRefusal | None = None


class LimitSettled(msgspec.Struct, frozen=True, array_like=True):
    """The end of the grant that answered question `number`, by the tokens used; None where it never ran."""

    number: int
    tokens: int | None


class PageRequest(msgspec.Struct, frozen=True, array_like=True):
    """A page that only the core can show."""

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


class CoreStatus(msgspec.Struct, frozen=True, array_like=True):
    """What requests meet: why no request could be served at once (None: it could), in all and by model, and
    what is done under pressure to requests of each model."""

    missing: str | None
    missing_by_model: dict[str, str | None]
    brownouts: dict[str, BrownoutView]


class EdgeWelcome(msgspec.Struct, frozen=True, array_like=True):
    """The core's first word: the deployment as JSON, where to listen (host, port), and the secret that the
    salts of caches are made from, so that a tenant has the same ones on every edge."""

    deployment: bytes
    addresses: list[tuple[str, int]]
    cache_secret: bytes = b""


class ToCore(msgspec.Struct, array_like=True):
    """From an edge. What it has submitted comes before what it has cancelled. `named` are calls by the id
    that the client has, with those of its requests. `started` is the address that it listens on, once;
    `failed` is why it cannot. `figures` are its metrics by the number that asked for them, and `beat` echoes
    the core's."""

    submits: list[LinkRequest] = []
    cancels: list[str] = []
    named: list[tuple[str, tuple[str, ...]]] = []
    takes: list[LimitRequest] = []
    settled: list[LimitSettled] = []
    asks: list[PageRequest] = []
    figures: list[tuple[int, bytes]] = []
    started: tuple[str, int] | None = None
    failed: ErrorNote | None = None
    beat: int = 0


class ToEdge(msgspec.Struct, array_like=True):
    """From the core. All deltas of a turn come before all ends, which changes nothing for any request, and
    before all that went `fast_path`, each of them a SessionResponse of deltas that are just the next of their
    streams. Numbers in `scrapes` ask for the edge's metrics."""

    deltas: list[LinkDelta] = []
    fast_path: list[bytes] = []
    ends: list[Ended] = []
    leaves: list[LimitResponse] = []
    shown: list[PageResponse] = []
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
    """An error as the other side can make it again."""
    if isinstance(error, RequestError):
        return ErrorNote("RequestError", error.code, error.message, error.status, error.param)
    if isinstance(error, CapacityError):
        return ErrorNote("CapacityError", error.code, error.message, retry_after_s=error.retry_after_s)
    return ErrorNote(type(error).__name__, error.code, error.message)


def error_of(note: ErrorNote) -> KvasirError:
    """The error that `note_of` was given; one of a kind that clients never see is a KvasirError."""
    if note.kind == "RequestError":
        return RequestError(note.message, status=note.status, code=note.code, param=note.param)
    if note.kind == "CapacityError":
        return CapacityError(note.message, code=note.code, retry_after_s=note.retry_after_s)
    return _KINDS.get(note.kind, KvasirError)(note.message, code=note.code)


def _plain(value: Any) -> bytes:
    """What the encoder does not know: arrays, as their type code and their bytes."""
    if isinstance(value, array):
        return value.typecode.encode() + value.tobytes()
    raise NotImplementedError(type(value))


def _array(kind: type, value: Any) -> Any:
    """What `_plain` made."""
    if kind is not array or not isinstance(value, bytes) or value[:1] not in (b"I", b"Q", b"f"):
        raise ValueError("no array")
    made = array(chr(value[0]))
    made.frombytes(value[1:])
    return made


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def frames(message: ToCore | ToEdge, refuse: Callable[[ToCore | ToEdge], None]) -> Iterator[bytes]:
    """`message` in as few frames as hold it. What is too large for one by itself goes to `refuse`, alone in a
    message."""
    body = _encode(message)
    if len(body) <= MAX_FRAME_BYTES:
        yield _LENGTH.pack(len(body)) + body
    elif (parts := _halves(message)) is None:
        refuse(message)
    else:
        for part in parts:
            yield from frames(part, refuse)


def _halves(message: Frame) -> tuple[Frame, Frame] | None:
    """Two messages that say the same one after the other; None for a single thing."""
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
    """Takes bytes as they come, and gives whole frames of one kind. Holds less than one frame."""

    def __init__(self, kind: type[Frame]) -> None:
        self._decode: Callable[[memoryview], Frame] = msgspec.msgpack.Decoder(kind, dec_hook=_array).decode
        self._held = bytearray()

    def take(self, data: bytes) -> list[Frame]:
        """All frames that are complete with `data`. Raises ProtocolError for what is none."""
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
