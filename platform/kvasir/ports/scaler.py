"""How many replicas each pool has, seen and changed.

Whoever decides on sizes speaks to this and to nothing else, so that the same decisions are made over Ray
Serve and in simulated time. A pool has one owner of its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class ReplicaState(StrEnum):
    """STARTING: it has been asked for and does not serve yet. LEAVING: it takes nothing new, and ends what
    it runs."""

    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of one pool. `replica_id` is the owner's name for it, `worker_id` the one that routers know
    it by, "" while it has none. `since_s`: when it came to be in this state, as a reading of the clock of
    whoever looks."""

    replica_id: str
    pool: str
    state: ReplicaState
    since_s: float
    worker_id: str = ""


class Scaler(Protocol):
    """Obligations: a call returns once the order was taken, not when it is carried out; what is asked for
    twice is done once; a replica that retires ends its streams first; no other replica than those named
    retires, unless the pool's owner replaces one that has failed. Each raises UpstreamError (`not_ready`)
    where the owner cannot be asked, and nothing has been changed then."""

    def observe(self) -> Sequence[Replica]:
        """Every replica that exists or has been asked for, of all pools."""
        ...

    def start(self, pool: str, count: int) -> None:
        """Ask for so many more replicas of a pool. Raises ConfigError for a pool that does not exist, or
        where it would have more than it may, those that leave included."""
        ...

    def retire(self, pool: str, replica_ids: Sequence[str]) -> None:
        """Have these replicas of a pool drain and end, or not start at all. Those that are not known, or
        leave already, are ignored."""
        ...
