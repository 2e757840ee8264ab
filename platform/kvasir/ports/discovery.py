"""Discovery of workers and their addresses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from kvasir.core.membership import Endpoint, MembershipSnapshot

__all__ = ["Discovery", "Endpoint", "MembershipSnapshot"]


class Discovery(Protocol):
    """A source of membership. It lists the expected workers; sessions show which are alive."""

    def watch(self) -> AsyncIterator[MembershipSnapshot]:
        """Yield the current snapshot at once, then one per change. If its source fails, it keeps the last
        snapshot (fail-static) and retries. It ends only when cancelled or closed."""
        ...

    def stale_s(self) -> float:
        """Seconds since the source last answered, which bounds the age of the newest snapshot. 0 while it
        answers."""
        ...

    async def close(self) -> None:
        """End all watches. Idempotent."""
        ...
