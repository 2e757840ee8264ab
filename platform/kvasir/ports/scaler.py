"""The port that reads and changes the number of replicas of each pool.

The planner uses only this port, so that the same code runs with Ray Serve and in simulated time. Each pool's
size has one owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class ReplicaState(StrEnum):
    """STARTING: requested, and not serving yet. LEAVING: accepts no new requests, and ends running ones."""

    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of one pool. `replica_id` is its name at the owner, `worker_id` its id at routers, "" while
    it has none. `since_s` is the time of the last change of state, as a reading of the observer's clock."""

    replica_id: str
    pool: str
    state: ReplicaState
    since_s: float
    worker_id: str = ""


class Scaler(Protocol):
    """Obligations: a call returns when the order is accepted, not when it is complete; repeated orders have
    no further effect; a retiring replica ends its streams first; only named replicas retire, except failed
    ones that the owner replaces. Each method raises UpstreamError (`not_ready`) without any change if the
    owner is unreachable."""

    def observe(self) -> Sequence[Replica]:
        """Return every existing or requested replica of all pools."""
        ...

    def start(self, pool: str, count: int) -> None:
        """Request `count` more replicas of a pool. Raises ConfigError for an unknown pool, or if the pool
        would exceed its maximum, including leaving replicas."""
        ...

    def retire(self, pool: str, replica_ids: Sequence[str]) -> None:
        """Drain and end these replicas of a pool, or cancel their start. Unknown and leaving ones are
        ignored."""
        ...
