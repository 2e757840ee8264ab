"""Which workers exist and where they listen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from kvasir.core.membership import Endpoint, MembershipSnapshot

__all__ = ["Discovery", "Endpoint", "MembershipSnapshot"]


class Discovery(Protocol):
    """A source of membership. It says who should exist; sessions say who is alive."""

    def watch(self) -> AsyncIterator[MembershipSnapshot]:
        """The current snapshot at once, then one per change. On trouble with its source it keeps the
        last snapshot (fail-static) and goes on trying; it ends only when cancelled or closed."""
        ...

    def stale_s(self) -> float:
        """For how many seconds its source has not answered: so old may the newest snapshot be. 0 while it
        does."""
        ...

    async def close(self) -> None:
        """End all watches. Idempotent."""
        ...
