"""Membership that a simulation sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvasir.core.membership import Endpoint, MembershipSnapshot


class FeedDiscovery:
    """`kvasir.ports.discovery.Discovery` over a set that `put` replaces."""

    def __init__(self) -> None:
        self._members = MembershipSnapshot(revision=1)
        self._changed = asyncio.Condition()
        self._closed = False

    @property
    def endpoints(self) -> frozenset[Endpoint]:
        """The current members."""
        return self._members.endpoints

    async def put(self, *endpoints: Endpoint) -> None:
        """Replace the members."""
        async with self._changed:
            if frozenset(endpoints) != self._members.endpoints:
                self._members = MembershipSnapshot(self._members.revision + 1, frozenset(endpoints))
                self._changed.notify_all()

    async def watch(self) -> AsyncIterator[MembershipSnapshot]:
        """See Discovery."""
        seen = 0
        while not self._closed:
            if self._members.revision != seen:
                seen = self._members.revision
                yield self._members
                continue
            async with self._changed:
                if not self._closed and self._members.revision == seen:
                    await self._changed.wait()

    def stale_s(self) -> float:
        """See Discovery: never stale."""
        return 0.0

    async def close(self) -> None:
        """See Discovery."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
