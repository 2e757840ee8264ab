"""Code that is too slow in Python for router and workers: block hashes, the radix tree over them, a worker's
shadow, copies and checksums of KV bytes, costs of places, and the fast path of a token to its client.

A block of a prompt is identified by a 64-bit hash chained over its parent, so that equal hashes mean equal
prefixes. The chain is Kvasir's own: a change of an engine's hash algorithm or seed cannot make the router's
index stale. A 64-bit hash chooses a worker and never chooses bytes.

The C++ module is used if it was built; the Python twin gives the same results more slowly.
"""

from __future__ import annotations

from struct import pack

import xxhash

from kvasir.core.identity import HASH_VERSION
from kvasir.native.stats import TreeStats

try:
    from kvasir.native._native import (
        CHECKSUM_FACTOR,
        CHECKSUM_LANES,
        CHECKSUM_SEED,
        CHECKSUM_TILE,
        PREDICTED,
        SLOTS,
        Fan,
        Lane,
        PrefixTree,
        ProcessRead,
        ProcessReader,
        Relay,
        Shadow,
        SocketLane,
        StreamGaps,
        StreamTokens,
        chain_hashes,
        checksum_pieces,
        checksum_weights,
        copy_pieces,
        cost_pairs,
        cost_terms,
        frame_piece,
        http_chunk,
        receive_pieces,
        send_pieces,
    )

    IS_NATIVE = True
except ImportError:  # no compiler when it was installed
    # The twin keeps the contract of the .pyi; to a type checker its classes are different classes.
    from kvasir.native._twin import (  # type: ignore[assignment]
        PREDICTED,
        SLOTS,
        PrefixTree,
        Shadow,
        chain_hashes,
    )
    from kvasir.native._twin_bytes import (
        CHECKSUM_FACTOR,
        CHECKSUM_LANES,
        CHECKSUM_SEED,
        CHECKSUM_TILE,
        checksum_pieces,
        checksum_weights,
        copy_pieces,
    )
    from kvasir.native._twin_costs import cost_pairs, cost_terms
    from kvasir.native._twin_framing import frame_piece, http_chunk
    from kvasir.native._twin_lanes import (  # type: ignore[assignment]
        Fan,
        Lane,
        Relay,
        SocketLane,
        StreamGaps,
        StreamTokens,
    )
    from kvasir.native._twin_process import ProcessRead, ProcessReader  # type: ignore[assignment]
    from kvasir.native._twin_sockets import receive_pieces, send_pieces

    IS_NATIVE = False

__all__ = [
    "CHECKSUM_FACTOR",
    "CHECKSUM_LANES",
    "CHECKSUM_SEED",
    "CHECKSUM_TILE",
    "IS_NATIVE",
    "PREDICTED",
    "SLOTS",
    "Fan",
    "Lane",
    "PrefixTree",
    "ProcessRead",
    "ProcessReader",
    "Relay",
    "Shadow",
    "SocketLane",
    "StreamGaps",
    "StreamTokens",
    "TreeStats",
    "chain_hashes",
    "checksum_pieces",
    "checksum_weights",
    "copy_pieces",
    "cost_pairs",
    "cost_terms",
    "frame_piece",
    "http_chunk",
    "receive_pieces",
    "root_hash",
    "send_pieces",
]


def root_hash(model: str, salt: str = "", adapter: str = "") -> int:
    """Return the root of a chain: prompts under another model, salt or LoRA adapter share no block.

    Each part is length-prefixed, so that no two triples have the same encoding.
    """
    parts = [pack("<I", HASH_VERSION)]
    for part in (model, salt, adapter):
        raw = part.encode()
        parts.append(pack("<I", len(raw)) + raw)
    return xxhash.xxh64_intdigest(b"".join(parts))
