"""One watch on membership for several routers, each of which gets the members of its own pools.

A source serves one watch, however many models the gateway has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from kvasir.core.membership import MembershipSnapshot
from kvasir.ports.discovery import Discovery


class SharedDiscovery:
    """Obligation: while `run` is running, every part has the newest snapshot, limited to its pools. The
    caller closes the source."""

    def __init__(self, source: Discovery) -> None:
        self._source = source
        self._parts: list[PoolDiscovery] = []

    def part(self, pools: Iterable[str]) -> PoolDiscovery:
        """Return a Discovery of the workers of these pools. Call before `run`."""
        made = PoolDiscovery(frozenset(pools), self._source)
        self._parts.append(made)
        return made

    async def run(self) -> None:
        """Watch until the source ends."""
        async for members in self._source.watch():
            for part in self._parts:
                part.take(members)


class PoolDiscovery:
    """`kvasir.ports.discovery.Discovery` of a part of the members."""

    def __init__(self, pools: frozenset[str], source: Discovery) -> None:
        self._pools = pools
        self._source = source
        self._members: MembershipSnapshot | None = None
        self._changed = asyncio.Event()
        self._closed = False

    def take(self, members: MembershipSnapshot) -> None:
        """Set a newer snapshot of all members."""
        own = frozenset(each for each in members.endpoints if each.pool in self._pools)
        if self._members is None or self._members.endpoints != own:
            self._members = MembershipSnapshot(members.revision, own)
            self._tell()

    async def watch(self) -> AsyncIterator[MembershipSnapshot]:
        """See Discovery."""
        seen: MembershipSnapshot | None = None
        while not self._closed:
            if self._members is not None and self._members is not seen:
                seen = self._members
                yield seen
            else:
                await self._changed.wait()

    def stale_s(self) -> float:
        """See Discovery."""
        return self._source.stale_s()

    async def close(self) -> None:
        """See Discovery."""
        self._closed = True
        self._tell()

    def _tell(self) -> None:
        """Wake all watches; each waits for the next change on an event of its own."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
