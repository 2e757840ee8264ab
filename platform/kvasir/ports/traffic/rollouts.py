"""What routers share of the rollouts of canaries: one state per route, and sums of counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class StoredRollout(NamedTuple):
    """The state of a rollout as its owner encoded it, b"" for none, and the sums of the counts of its `run`.
    `version` grows with each change of the state."""

    version: int
    run: int
    state: bytes
    counts: Mapping[str, int]


class RolloutStore(Protocol):
    """Obligations: counts are added at most once, and are lost if the call raises; of several changes from
    one version, one is stored; the counts of an earlier run are dropped. Calls raise UpstreamError if the
    store does not answer. All calls come from one event loop."""

    @property
    def shared(self) -> bool:
        """Whether other routers see the same rollouts."""
        ...

    async def add(self, route: str, run: int, counts: Mapping[str, int]) -> StoredRollout:
        """Add counts, unless another run is stored, and return what is stored."""
        ...

    async def replace(self, route: str, version: int, run: int, state: bytes) -> bool:
        """Store a state in place of the one of `version`. Return False, without a change, if that is not the
        version any more."""
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...
