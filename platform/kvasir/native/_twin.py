"""The Python twin of the native module: the same results, for machines without a compiler and as the
reference in differential tests."""

from __future__ import annotations

from array import array
from struct import pack

import xxhash


def chain_hashes(tokens: array[int], block_size: int, root: int) -> list[int]:
    """See kvasir.native.chain_hashes."""
    if block_size < 1:
        raise ValueError("block_size must be at least 1")
    view = memoryview(tokens)
    if view.itemsize != 4 or view.ndim != 1 or not view.contiguous:
        raise ValueError("tokens must be one contiguous buffer of uint32")
    data = view.cast("B")
    width = block_size * 4
    chain: list[int] = []
    parent = root
    for start in range(0, len(view) // block_size * width, width):
        parent = xxhash.xxh64_intdigest(pack("<Q", parent) + data[start : start + width])
        chain.append(parent)
    return chain
