"""The format of a block on disk and in Redis, with which a block is verified when it is read.

A file may be torn, and a server may hold what another version, another model or an unrelated program wrote
under the same key. So a blob's header identifies the block, and has checksums of the header and of the
payload; any mismatch is a miss, with a stable reason. The checksums detect accidents. They do not protect
against someone with write access to the disk or the server.
"""

from __future__ import annotations

from array import array
from dataclasses import astuple
from hashlib import blake2b
from struct import Struct, pack
from typing import NamedTuple

import numpy as np

from kvasir.core.identity import HASH_VERSION, KvLayout
from kvasir.native import checksum_pieces
from kvasir.ports.tier import KEY_BYTES, TierBlock

Bytes = bytes | bytearray | memoryview

VERSION = 2
MAGIC = b"KvasirKV"
FINGERPRINT_BYTES = 16
# Magic, version, flags, header bytes; fingerprint; key; block hash, parent, payload bytes, payload checksum.
_FIELDS = Struct(f"<8sHHI{FINGERPRINT_BYTES}s{KEY_BYTES}sQQQQ")
_SUM = Struct("<Q")
HEADER_BYTES = _FIELDS.size + _SUM.size
LANE_BYTES = 4
"""Payloads are a multiple of this size: the checksum's lanes."""

TRUNCATED = "truncated"
FOREIGN_MAGIC = "magic"
OTHER_VERSION = "version"
OTHER_FINGERPRINT = "fingerprint"
OTHER_KEY = "key"
OTHER_LENGTH = "length"
BAD_CHECKSUM = "checksum"


class Header(NamedTuple):
    """The content of a valid header: the block, its payload size, and the payload's checksum."""

    block: TierBlock
    length: int
    checksum: int


def fingerprint(model: str, revision: str, layout: KvLayout) -> bytes:
    """Return the FINGERPRINT_BYTES bytes common to all blobs of one kind: a digest of the model, its KV
    layout and the block hash scheme. LoRA adapters and salts are part of every block's key."""
    parts = [model, revision, *map(str, astuple(layout)), str(HASH_VERSION), str(VERSION)]
    # With their lengths, so that different parts never yield the same input.
    raw = b"".join(pack("<I", len(part)) + part for part in (text.encode() for text in parts))
    return blake2b(raw, digest_size=FINGERPRINT_BYTES, person=b"kvasir-kv-blob").digest()


def checksum(data: Bytes) -> int:
    """Return the checksum of one contiguous buffer of a multiple of LANE_BYTES bytes. Releases the GIL."""
    view = np.frombuffer(data, np.uint8)
    address = int(view.__array_interface__["data"][0])
    return checksum_pieces(array("Q", [address]), array("Q", [view.nbytes]), 1)[0]


def make_header(fingerprint: bytes, block: TierBlock, data: Bytes) -> bytes:
    """Return the HEADER_BYTES bytes that precede `data`. Reads all of `data`, for its checksum."""
    length = memoryview(data).nbytes
    fields = _FIELDS.pack(MAGIC, VERSION, 0, HEADER_BYTES, fingerprint, *block, length, checksum(data))
    return fields + _SUM.pack(checksum(fields))


def verify(header: Bytes, size: int, key: bytes, fingerprint: bytes, length: int) -> str | None:
    """Return why `size` bytes that start with this header are not such a blob with `length` payload bytes, as
    one of the reasons above; None if the header is valid. `verify_payload` checks the payload."""
    raw = memoryview(header).cast("B")
    if raw.nbytes < HEADER_BYTES:
        return TRUNCATED
    magic, version, *_ = fields = _FIELDS.unpack_from(raw)
    checks = (
        (FOREIGN_MAGIC, magic == MAGIC),
        (OTHER_VERSION, version == VERSION),
        (BAD_CHECKSUM, checksum(raw[: _FIELDS.size]) == _SUM.unpack_from(raw, _FIELDS.size)[0]),
        (OTHER_FINGERPRINT, fields[4] == fingerprint),
        (OTHER_KEY, fields[5] == key),
        (OTHER_LENGTH, fields[8] == length),
        (TRUNCATED, size >= HEADER_BYTES + length),
        (OTHER_LENGTH, size <= HEADER_BYTES + length),
    )
    return next((reason for reason, sound in checks if not sound), None)


def read_header(header: Bytes) -> Header:
    """Return the content of a header that `verify` accepted."""
    *_, key, name, parent, length, total = _FIELDS.unpack_from(header)
    return Header(TierBlock(key, name, parent), length, total)


def verify_payload(header: Header, data: Bytes) -> str | None:
    """Return why these are not the payload of the header; None if they are."""
    if memoryview(data).nbytes != header.length:
        return TRUNCATED
    return None if checksum(data) == header.checksum else BAD_CHECKSUM
