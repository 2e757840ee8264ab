"""Discovery from a fixed list, for one machine or an environment with stable addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from kvasir.core.errors import ConfigError
from kvasir.core.membership import Endpoint, MembershipSnapshot, is_worker_address


class StaticDiscovery:
    """`kvasir.ports.discovery.Discovery` over endpoints written `pool=host:port`.

    The address is the worker's id, so a replaced worker is recognised only by the epoch of its identity.
    """

    def __init__(self, endpoints: Iterable[str]) -> None:
        self._members = MembershipSnapshot(revision=1, endpoints=frozenset(map(parse_endpoint, endpoints)))
        self._closed = asyncio.Event()

    async def watch(self) -> AsyncIterator[MembershipSnapshot]:
        """See Discovery."""
        if self._closed.is_set():
            return
        yield self._members
        await self._closed.wait()

    def stale_s(self) -> float:
        """See Discovery; does nothing."""
        return 0.0

    async def close(self) -> None:
        """See Discovery."""
        self._closed.set()


def parse_endpoint(text: str) -> Endpoint:
    """Parse `pool=host:port`. Raises ConfigError for anything else."""
    pool, equals, address = text.partition("=")
    if not (pool and equals and is_worker_address(address)):
        raise ConfigError(f"endpoint {text!r} is not `pool=host:port`")
    return Endpoint(worker_id=f"{pool}@{address}", address=address, pool=pool)
