"""Progress of a pool's rolling restart, from Ray Serve's list of its replicas. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RUNNING = "RUNNING"


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    """One replica as Ray Serve lists it. `state` is Serve's own."""

    replica_id: str
    state: str
    pid: int | None = None


@dataclass(slots=True)
class Rolling:
    """One restart of one pool. `old` are the replicas that it replaces, each until it is gone, which is after
    its drain; `deadline` is on the clock of `step`, in seconds."""

    pool: str
    old: frozenset[str]
    wanted: int
    deadline: float
    replaced: int = 0

    def step(self, rows: Sequence[ReplicaRow], *, failure: str, now: float) -> str | None:
        """Return "progress", "done", "failed", or None if nothing has changed. `failure` is why Serve has
        given up, "" while it has not."""
        present = {row.replica_id for row in rows}
        serving = [row for row in rows if row.state == RUNNING and row.replica_id not in self.old]
        replaced = min(len(self.old - present), len(serving))
        changed, self.replaced = replaced != self.replaced, replaced
        if not self.old & present and len(serving) >= self.wanted:
            return "done"
        if failure or now >= self.deadline:
            return "failed"
        return "progress" if changed else None
