"""Messages between two agents on their control connection.

Blocks are sent through the process group. The control connection carries the requests, the order of the
chunks, and the result of each pull on the serving side. Pull numbers are chosen by the puller, unique per
connection.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kvasir.core.errors import TransferError

MAX_FRAME_BYTES = 256 << 10
SUMS = np.dtype("<u8")


class StorePut(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """A key of the process group's store, to set in the other side's copy."""

    key: str
    value: bytes


class PullRequest(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """Requests `blocks` blocks of a lease from number `first` on, of each the part `index` of `of`, as number
    `reader` of `readers`. `proof` shows that the puller has the lease's key, on this connection."""

    number: int
    lease_id: str
    fence: int
    first: int
    blocks: int
    index: int
    of: int
    reader: int
    readers: int
    proof: bytes


class PairProven(msgspec.Struct, frozen=True, array_like=True, tag="j"):
    """The puller has authenticated the server over the process group."""


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """The puller cancels this pull."""

    number: int


class Confirm(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """The puller has received this pull completely."""

    number: int


class ChunkReceived(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """The oldest unacknowledged chunk of this connection has been received."""


class Opening(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """The next chunks of this pull hold `blocks` blocks, from number `first` of the pull on. `sums` are their
    checksums, the same number for each block or none, encoded as SUMS."""

    number: int
    first: int
    blocks: int
    sums: bytes


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """The next message of the process group carries the pieces from `start` up to `stop` of this pull's last
    opened batch: see common/memory.py."""

    number: int
    start: int
    stop: int


class End(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """The end of this pull. With `reason` "", the lease was live after its last byte was read; otherwise
    `reason` is one of PullFailed's reasons."""

    number: int
    reason: str
    detail: str


Message = StorePut | PairProven | PullRequest | Withdraw | Confirm | ChunkReceived | Opening | Chunk | End

_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return one frame's payload. Raise TransferError if it exceeds MAX_FRAME_BYTES."""
    payload = msgspec.msgpack.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise TransferError(f"a control message of {len(payload)} bytes exceeds {MAX_FRAME_BYTES}")
    return payload


def decode(payload: bytes) -> Message:
    """The inverse of `encode`. Raise TransferError."""
    try:
        message: Message = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise TransferError(f"not a control message: {error}") from error
    return message
