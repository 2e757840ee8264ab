"""What a prefill worker hands to a decode worker, through the router, so that it can pull.

A ticket is self-contained: every rank's endpoint and the block ids. So no side channel has to be bound,
bounded, found or secured, and a decode worker can pull from a prefill worker that it never heard of.
It travels over authenticated sessions; what arrives is still checked for size, form and checksum before
any of it reaches native code.
"""

from __future__ import annotations

import base64
import binascii
import zlib

import msgspec

from kvasir.core.errors import TransferError

MAX_ENCODED_BYTES = 4 << 20
MAX_DECODED_BYTES = 16 << 20


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`ranks` holds one agent endpoint per tensor-parallel rank, in rank order; `blocks` the block ids
    on the offering side, in the prompt's order, that were complete when the ticket was written, the first of
    `total`."""

    ranks: tuple[str, ...]
    blocks: tuple[int, ...]
    total: int


def pack(payload: bytes) -> str:
    """Compressed and checksummed (zlib's Adler-32), as printable text."""
    return base64.b85encode(zlib.compress(payload, 1)).decode()


def unpack(text: str) -> bytes:
    """The payload of `pack`. Raises TransferError for anything else, or anything too long."""
    if len(text) > MAX_ENCODED_BYTES:
        raise TransferError(f"a ticket of {len(text)} bytes exceeds {MAX_ENCODED_BYTES}")
    try:
        inflate = zlib.decompressobj()
        payload = inflate.decompress(base64.b85decode(text.encode()), MAX_DECODED_BYTES)
    except (ValueError, binascii.Error, zlib.error) as error:
        raise TransferError(f"not a transfer ticket: {error}") from error
    if not inflate.eof:
        raise TransferError("a transfer ticket that is cut short or too long")
    return payload


def encode(ticket: Ticket) -> str:
    """The text that goes into KvHandoff.ticket."""
    return pack(msgspec.msgpack.encode(ticket))


def decode(text: str) -> Ticket:
    """The inverse of `encode`. Raises TransferError."""
    try:
        return msgspec.msgpack.decode(unpack(text), type=Ticket)
    except msgspec.MsgspecError as error:
        raise TransferError(f"not a transfer ticket: {error}") from error
