"""Salts names, so that those of two recordings cannot be joined, and none can be traced to what it names.

Names of blocks are hashes without a key, of which someone who guesses a prompt could compute the same. They
go through SipHash-2-4 (Aumasson and Bernstein, 2012), a pseudorandom function with a key of 128 bits, for
whole arrays at once: names are many, and hashlib takes a microsecond for each.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_START = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
_LENGTH = np.uint64(8 << 56)
_BITS = np.uint64(64 - 53)
"""53 bits are left, which every reader of JSON keeps."""


class Salt:
    """Salts names with a key that is derived from `secret`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = blake2b(secret, digest_size=32).digest()
        key = blake2b(secret, digest_size=16, person=b"blocks").digest()
        self._key = tuple(int.from_bytes(part, "little") for part in (key[:8], key[8:]))

    def blocks(self, names: array[int]) -> list[int]:
        """Return names of blocks, from 0 to 2^53 - 1, in the same order."""
        hashed = siphash(np.frombuffer(names, np.uint64), self._key) >> _BITS
        salted: list[int] = hashed.tolist()
        return salted

    def label(self, kind: str, name: str) -> str:
        """Return the salted name of a tenant or session (`kind`); "" for none."""
        if not name:
            return ""
        digest = blake2b(name.encode(), digest_size=8, key=self._secret, person=kind.encode()).hexdigest()
        return f"{kind}-{digest}"


def siphash(words: Words, key: tuple[int, ...]) -> Words:
    """Return SipHash-2-4 of each word, as a message of 8 bytes."""
    first, second = key
    state = [
        np.full(words.shape, start ^ (second if at % 2 else first), np.uint64)
        for at, start in enumerate(_START)
    ]
    state[3] ^= words
    _rounds(state, 2)
    state[0] ^= words
    state[3] ^= _LENGTH
    _rounds(state, 2)
    state[0] ^= _LENGTH
    state[2] ^= np.uint64(0xFF)
    _rounds(state, 4)
    hashed: Words = state[0] ^ state[1] ^ state[2] ^ state[3]
    return hashed


def _rounds(state: list[Words], count: int) -> None:
    v0, v1, v2, v3 = state
    for _ in range(count):
        v0 += v1
        v1[:] = _rotated(v1, 13)
        v1 ^= v0
        v0[:] = _rotated(v0, 32)
        v2 += v3
        v3[:] = _rotated(v3, 16)
        v3 ^= v2
        v0 += v3
        v3[:] = _rotated(v3, 21)
        v3 ^= v0
        v2 += v1
        v1[:] = _rotated(v1, 17)
        v1 ^= v2
        v2[:] = _rotated(v2, 32)


def _rotated(words: Words, bits: int) -> Words:
    rotated: Words = (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))
    return rotated
