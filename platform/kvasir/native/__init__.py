"""Block hashes that router and workers compute alike.

A block of a prompt is named by a 64-bit hash chained over its parent, so that equal names mean equal
prefixes. The chain is Kvasir's own: an engine's hash algorithm or seed can change without the router's
index going stale. A 64-bit name chooses a worker and never chooses bytes.

The C++ module is used where it was built; the Python twin gives the same names more slowly.
"""

from __future__ import annotations

from array import array
from struct import pack

import xxhash

from kvasir.core.identity import HASH_VERSION

try:
    from kvasir.native._native import chain_hashes as _chain_hashes

    IS_NATIVE = True
except ImportError:  # no compiler when it was installed
    from kvasir.native._twin import chain_hashes as _chain_hashes

    IS_NATIVE = False


def chain_hashes(tokens: array[int], block_size: int, root: int) -> list[int]:
    """The chained XXH64 of each whole block of `tokens` (uint32), starting from `root`.

    A trailing partial block has no name. Raises ValueError for a block size below 1 or a buffer that
    is not contiguous uint32.
    """
    return _chain_hashes(tokens, block_size, root)


def root_hash(model: str, salt: str = "", adapter: str = "") -> int:
    """Where a chain starts: prompts under another model, salt or LoRA adapter share no block.

    Each part is length-prefixed, so that no two triples read alike.
    """
    parts = [pack("<I", HASH_VERSION)]
    for part in (model, salt, adapter):
        raw = part.encode()
        parts.append(pack("<I", len(raw)) + raw)
    return xxhash.xxh64_intdigest(b"".join(parts))
