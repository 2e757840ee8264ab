"""Reports of stored and evicted blocks of the simulated cache to the worker's record."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from kvasir_workers.server.holdings import Holdings

_KEY_BYTES = 8


class CacheReport:
    """One rank's part of a worker's record. A block's digest is truncated to a 64-bit key."""

    def __init__(self, holdings: Holdings, rank: int, block_size: int) -> None:
        self._holdings = holdings
        self._rank = rank
        self._block_size = block_size

    def stored(
        self, parent: bytes | None, digests: Iterable[bytes], tokens: array[int], salt: str, adapter: str
    ) -> None:
        """Record consecutive full blocks as cached, each with one more block of memory. `parent` is the block
        before the first, None at the beginning of a prompt."""
        above = None if parent is None else _key(parent)
        self._holdings.store(
            self._rank, above, _keys(digests), tokens, self._block_size, salt=salt, adapter=adapter
        )

    def evicted(self, digests: Iterable[bytes]) -> None:
        """Record that one block of memory with each of these digests was reused."""
        self._holdings.remove(self._rank, _keys(digests))


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[:_KEY_BYTES], sys.byteorder)


def _keys(digests: Iterable[bytes]) -> array[int]:
    return array("Q", b"".join(digest[:_KEY_BYTES] for digest in digests))
