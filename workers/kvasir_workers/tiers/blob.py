"""The form of a block outside memory, the same on disk and in Redis, so that what comes back can be judged.

A file may be torn, a server may hold what another version, another model or a stray program wrote under our
key. So a blob says in its header what it is, and carries checksums of its header and of its bytes; what does
not say exactly what is expected is a miss, with the reason as a stable word. The checksums find accidents.
They are no seal against somebody who may write to the disk or the server.
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

VERSION = 1
MAGIC = b"KvasirKV"
FINGERPRINT_BYTES = 16
# Magic, version, flags, header bytes; fingerprint; key; name, parent, payload bytes, payload checksum.
_FIELDS = Struct(f"<8sHHI{FINGERPRINT_BYTES}s{KEY_BYTES}sQQQQ")
_SUM = Struct("<Q")
HEADER_BYTES = _FIELDS.size + _SUM.size
LANE_BYTES = 4
"""Payloads are whole numbers of these: the checksum's lanes."""

TRUNCATED = "truncated"
FOREIGN_MAGIC = "magic"
OTHER_VERSION = "version"
OTHER_FINGERPRINT = "fingerprint"
OTHER_KEY = "key"
OTHER_LENGTH = "length"
BAD_CHECKSUM = "checksum"


class Header(NamedTuple):
    """What a sound header says of its payload: whose it is, how many bytes, and their checksum."""

    block: TierBlock
    length: int
    checksum: int


def fingerprint(model: str, revision: str, layout: KvLayout) -> bytes:
    """What all blobs of one kind have in common: FINGERPRINT_BYTES bytes over the model, the layout of its
    KV and how blocks are named. LoRA adapters and salts are part of every block's key."""
    parts = [model, revision, *map(str, astuple(layout)), str(HASH_VERSION), str(VERSION)]
    # With their lengths, so that no two rows of parts read alike.
    raw = b"".join(pack("<I", len(part)) + part for part in (text.encode() for text in parts))
    return blake2b(raw, digest_size=FINGERPRINT_BYTES, person=b"kvasir-kv-blob").digest()


def checksum(data: Bytes) -> int:
    """Of one contiguous buffer of a multiple of LANE_BYTES bytes. Without Python's lock."""
    view = np.frombuffer(data, np.uint8)
    address = int(view.__array_interface__["data"][0])
    return checksum_pieces(array("Q", [address]), array("Q", [view.nbytes]), 1)[0]


def make_header(fingerprint: bytes, block: TierBlock, data: Bytes) -> bytes:
    """The HEADER_BYTES bytes that go before `data`. Reads all of `data`, for its checksum."""
    length = memoryview(data).nbytes
    fields = _FIELDS.pack(MAGIC, VERSION, 0, HEADER_BYTES, fingerprint, *block, length, checksum(data))
    return fields + _SUM.pack(checksum(fields))


def verify(header: Bytes, size: int, key: bytes, fingerprint: bytes, length: int) -> str | None:
    """Why `size` bytes that begin so are not such a blob with `length` bytes behind its header, as one of the
    words above; None when they may be, since what is behind the header is for `verify_payload`."""
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
    """What a header says that `verify` found nothing wrong with."""
    *_, key, name, parent, length, total = _FIELDS.unpack_from(header)
    return Header(TierBlock(key, name, parent), length, total)


def verify_payload(header: Header, data: Bytes) -> str | None:
    """Why these are not the bytes that the header speaks of; None when they are."""
    if memoryview(data).nbytes != header.length:
        return TRUNCATED
    return None if checksum(data) == header.checksum else BAD_CHECKSUM
