"""Rollouts of a router that shares them with no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvasir.ports.traffic.rollouts import StoredRollout


class MemoryRollouts:
    """`kvasir.ports.traffic.rollouts.RolloutStore` in the memory of this process."""

    shared = False

    def __init__(self) -> None:
        self._stored: dict[str, StoredRollout] = {}

    async def add(self, route: str, run: int, counts: Mapping[str, int]) -> StoredRollout:
        """See RolloutStore."""
        stored = self._stored.get(route, StoredRollout(0, 0, b"", {}))
        if stored.run == run and counts:
            stored = stored._replace(counts=Counter(stored.counts) + Counter(counts))
            self._stored[route] = stored
        return stored

    async def replace(self, route: str, version: int, run: int, state: bytes) -> bool:
        """See RolloutStore."""
        stored = self._stored.get(route, StoredRollout(0, 0, b"", {}))
        if stored.version != version:
            return False
        counts = stored.counts if stored.run == run else {}
        self._stored[route] = StoredRollout(version + 1, run, state, counts)
        return True

    async def close(self) -> None:
        """There is nothing to release."""
