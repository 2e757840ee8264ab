"""The ticket that a prefill worker sends to a decode worker, through the router, so that it can pull.

A ticket is self-contained: it has every rank's endpoint and the block ids, so that a decode worker can pull
from a prefill worker without a side channel or discovery. It is sent over authenticated sessions; its size,
form and checksum are checked before any of it reaches native code.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import TypeVar

import msgspec

from kvasir.core.errors import TransferError

MAX_ENCODED_BYTES = 4 << 20
MAX_DECODED_BYTES = 16 << 20

StructT = TypeVar("StructT", bound=msgspec.Struct)


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`ranks` has one agent endpoint per tensor-parallel rank, in rank order, of one after another of the
    `stages` pipeline stages; `blocks` are the sender's block ids, in the prompt's order, that were complete
    when the ticket was written, the first of `total`."""

    ranks: tuple[str, ...]
    blocks: tuple[int, ...]
    total: int
    stages: int = 1


def pack(payload: bytes) -> str:
    """Return the payload, compressed and checksummed (zlib's Adler-32), as printable text."""
    return base64.b85encode(zlib.compress(payload, 1)).decode()


def unpack(text: str) -> bytes:
    """The inverse of `pack`. Raise TransferError for a text that is malformed or exceeds a limit."""
    if len(text) > MAX_ENCODED_BYTES:
        raise TransferError(f"a ticket of {len(text)} bytes exceeds {MAX_ENCODED_BYTES}")
    try:
        inflate = zlib.decompressobj()
        payload = inflate.decompress(base64.b85decode(text.encode()), MAX_DECODED_BYTES)
    except (ValueError, binascii.Error, zlib.error) as error:
        raise TransferError(f"not a valid transfer ticket: {error}") from error
    if not inflate.eof:
        raise TransferError("the transfer ticket is cut short or too long")
    return payload


def pack_struct(struct: msgspec.Struct) -> str:
    """Return a struct as printable text."""
    return pack(msgspec.msgpack.encode(struct))


def unpack_struct(text: str, kind: type[StructT], name: str) -> StructT:
    """The inverse of `pack_struct`. `name` describes `kind` in error messages. Raise TransferError."""
    try:
        return msgspec.msgpack.decode(unpack(text), type=kind)
    except msgspec.MsgspecError as error:
        raise TransferError(f"not a valid {name}: {error}") from error


def require_version(version: int, supported: int) -> None:
    """Raise TransferError for an endpoint of another version."""
    if version != supported:
        raise TransferError(f"endpoint version {version} is not {supported}")


def encode(ticket: Ticket) -> str:
    """Return the text of KvHandoff.ticket."""
    return pack_struct(ticket)


def decode(text: str) -> Ticket:
    """The inverse of `encode`. Raise TransferError."""
    return unpack_struct(text, Ticket, "transfer ticket")
