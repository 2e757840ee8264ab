"""Messages between two cells: one kind per direction, each with everything of one turn of the sender's loop.

Cells are upgraded one after the other. Structs are arrays whose decoders ignore what a newer release appends
and fill in what an older one lacks; requests, deltas and summaries are maps, which may differ likewise. Times
are durations, because clocks of two machines do not compare.
"""

from __future__ import annotations

import msgspec

from kvasir.core.errors import ProtocolError
from kvasir_platform.edge.frames import Ended, LinkDelta, LinkRequest, plain, plain_array
from kvasir_platform.regions.needs.media import MediaPiece
from kvasir_platform.regions.sharing.asks import LimitAllotted, LimitAsk, TenantSlotAsk, TenantSlots
from kvasir_router.regions.sharing.spending import CellSpending

VERSION = 1
MAX_MESSAGE_BYTES = 32 << 20
MAX_SUBMITS = 16
MAX_DELTAS = 4096
"""Items of one message, so that it stays below the limit of bytes."""
MAX_TOKENS = 1 << 20
"""Tokens of the prompts of one message, four bytes each. A longer prompt is alone in its message."""


class CellHello(msgspec.Struct, frozen=True, array_like=True):
    """The origin's first message: who connects."""

    version: int
    cell: str
    router_id: str


class CellWelcome(msgspec.Struct, frozen=True, array_like=True):
    """The serving cell's answer. It ends what it runs for the origin `lease_s` after the last beat that the
    origin has echoed. `tokenizers` has the digest of each model's tokenizer and chat template."""

    version: int
    cell: str
    lease_s: float
    tokenizers: dict[str, str] = {}


class SentRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request, without readings of the origin's clock. It has to end within `remaining_s`, None for no
    limit."""

    request: LinkRequest
    remaining_s: float | None = None


class ToServing(msgspec.Struct, array_like=True):
    """From the origin. `beat` is the last one that it has received, and `sent_s` a reading of its clock that
    the other side returns. `pieces` precede the requests whose media they are."""

    hello: CellHello | None = None
    submits: list[SentRequest] = []
    cancels: list[str] = []
    beat: int = 0
    sent_s: float = 0.0
    asks: list[LimitAsk] = []
    slot_asks: list[TenantSlotAsk] = []
    pieces: list[MediaPiece] = []


class ToOrigin(msgspec.Struct, array_like=True):
    """From the serving cell. All deltas precede all ends. `report` is an encoded CellReport, empty for none.
    `echo` is the last `sent_s`, and the seconds since it was received. `allotted` answers `asks`,
    and `slots` the `slot_asks`. `spending` comes with a report, if tenants have budgets."""

    welcome: CellWelcome | None = None
    deltas: list[LinkDelta] = []
    ends: list[Ended] = []
    report: bytes = b""
    beat: int = 0
    echo: tuple[float, float] | None = None
    allotted: list[LimitAllotted] = []
    slots: list[TenantSlots] = []
    spending: CellSpending | None = None


_encoder = msgspec.msgpack.Encoder(enc_hook=plain)
_to_serving = msgspec.msgpack.Decoder(ToServing, dec_hook=plain_array)
_to_origin = msgspec.msgpack.Decoder(ToOrigin, dec_hook=plain_array)


def encode_message(message: ToServing | ToOrigin) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def decode_to_serving(data: bytes) -> ToServing:
    """Return a message of an origin. Raise ProtocolError for a malformed one."""
    try:
        return _to_serving.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"a cell sent an invalid message: {error}") from error


def decode_to_origin(data: bytes) -> ToOrigin:
    """Return a message of a serving cell. Raise ProtocolError for a malformed one."""
    try:
        return _to_origin.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"a cell sent an invalid message: {error}") from error
