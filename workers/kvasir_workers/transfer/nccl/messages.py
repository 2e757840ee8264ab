"""What two agents say to each other on their control connection.

Blocks go through the process group; here go the requests, the order in which chunks of blocks will come,
and how each pull ended on the serving side. Numbers of pulls are the puller's own, unique per connection.
"""

from __future__ import annotations

import msgspec
import numpy as np

from kvasir.core.errors import TransferError

MAX_FRAME_BYTES = 256 << 10
SUMS = np.dtype("<u8")


class StorePut(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """A key of the process group's store, for the other side's copy of it."""

    key: str
    value: bytes


class PullRequest(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """The `blocks` blocks of a lease from number `first` on, of each part `index` of `of`."""

    number: int
    lease_id: str
    fence: int
    first: int
    blocks: int
    index: int
    of: int


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """The puller wants no more of this pull."""

    number: int


class Confirm(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """The puller holds all that it wanted of this pull."""

    number: int


class ChunkReceived(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """The oldest chunk of this connection that was not told of so far has arrived whole."""


class Opening(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """The next chunks of this pull hold `blocks` blocks, from the pull's own number `first` on. `sums` are
    their checksums, equally many for each block, or none, as SUMS."""

    number: int
    first: int
    blocks: int
    sums: bytes


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """The next message of the process group carries the pieces from `start` up to `stop` of the batch of this
    pull that was opened last: see memory.py."""

    number: int
    start: int
    stop: int


class End(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """Nothing more comes for this pull. With `reason` "", the lease was live after its last byte was read;
    otherwise `reason` is one of PullFailed's words."""

    number: int
    reason: str
    detail: str


Message = StorePut | PullRequest | Withdraw | Confirm | ChunkReceived | Opening | Chunk | End

_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One frame's payload. Raises TransferError for one that the other side would refuse."""
    payload = msgspec.msgpack.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise TransferError(f"a control message of {len(payload)} bytes exceeds {MAX_FRAME_BYTES}")
    return payload


def decode(payload: bytes) -> Message:
    """The inverse of `encode`. Raises TransferError."""
    try:
        message: Message = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise TransferError(f"not a control message: {error}") from error
    return message
