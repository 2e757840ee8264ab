"""Which workers exist and where they listen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A worker's gRPC address (`host:port`, or an in-memory name) and the pool it says it is of.

    `worker_id` is unique per process life: a replaced worker has a new one.
    """

    worker_id: str
    address: str
    pool: str


@dataclass(frozen=True, slots=True)
class Members:
    """A whole snapshot at `revision`. Revisions grow; an equal revision means an equal set."""

    revision: int
    endpoints: frozenset[Endpoint] = field(default_factory=frozenset)


class Discovery(Protocol):
    """A source of membership. It says who should exist; sessions say who is alive."""

    def watch(self) -> AsyncIterator[Members]:
        """The current snapshot at once, then one per change. On trouble with its source it keeps the
        last snapshot (fail-static) and goes on trying; it ends only when cancelled or closed."""
        ...

    async def close(self) -> None:
        """End all watches. Idempotent."""
        ...
