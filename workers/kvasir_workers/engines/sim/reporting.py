"""What the simulated cache stores and evicts, as the worker's record takes it."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from kvasir_workers.server.holdings import Holdings

_KEY_BYTES = 8


class CacheReport:
    """One rank's part of a worker's record. An engine's digest of a block is cut to the 64 bits of a key."""

    def __init__(self, holdings: Holdings, rank: int, block_size: int) -> None:
        self._holdings = holdings
        self._rank = rank
        self._block_size = block_size

    def stored(
        self, parent: bytes | None, digests: Iterable[bytes], tokens: array[int], salt: str, adapter: str
    ) -> None:
        """Full blocks that follow each other can be found, each under one more block of memory. `parent`
        is what comes before the first, None at the beginning of a prompt."""
        above = None if parent is None else _key(parent)
        self._holdings.store(
            self._rank, above, _keys(digests), tokens, self._block_size, salt=salt, adapter=adapter
        )

    def evicted(self, digests: Iterable[bytes]) -> None:
        """One block of memory under each of these has been given to another use."""
        self._holdings.remove(self._rank, _keys(digests))


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[:_KEY_BYTES], sys.byteorder)


def _keys(digests: Iterable[bytes]) -> array[int]:
    return array("Q", b"".join(digest[:_KEY_BYTES] for digest in digests))
