"""A pool as Ray Serve reports it: its replicas, the progress of a rolling restart, and why it is not running.
Pure.

Serve reports the error of a constructor as Ray's traceback. Users get the error without it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

    from kvasir_workers.pool.failures import StartFailure

RUNNING = "RUNNING"
DEPLOY_FAILED = "DEPLOY_FAILED"
_COLOURS = re.compile(r"\x1b\[\d+m")
_ERROR = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Exit)(?:\(\w+\))?): ", re.M)


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """One pool as Ray Serve reports it. `state` is Serve's own; `message` says why it is not running. The
    other fields are those of its newest replica that did not start (kvasir_workers.pool.failures)."""

    pool: str
    state: str
    wanted: int
    running: int
    message: str = ""
    remedy: str = ""
    log: str = ""
    permanent: bool = False

    @property
    def ready(self) -> bool:
        return self.state == RUNNING and self.running >= self.wanted

    @property
    def gave_up(self) -> bool:
        """Whether Serve has given up: it starts no further replica until the pool changes."""
        return self.state == DEPLOY_FAILED

    @property
    def failed(self) -> bool:
        """Whether Serve has given up, or starts again what cannot start."""
        return self.gave_up or self.permanent

    def failing(self, failure: StartFailure) -> PoolStatus:
        """Return the status with the reason for which its newest replica did not start."""
        return replace(
            self,
            message=failure.message,
            remedy=failure.remedy,
            log=failure.log,
            permanent=failure.permanent,
        )


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


def pool_status(pool: str, wanted: int, application: ApplicationStatusOverview | None) -> PoolStatus:
    """Return the status of a pool from that of its application, None if there is none."""
    if application is None:
        return PoolStatus(pool, "NOT_STARTED", wanted, 0)
    overview = application.deployments.get(pool)
    running = overview.replica_states.get("RUNNING", 0) if overview else 0
    message = (overview.message if overview else "") or application.message
    return PoolStatus(pool, application.status.value, wanted, running, without_traceback(message))


def without_traceback(message: str) -> str:
    """Return a message of Serve with the last error of its traceback in place of the traceback."""
    text = _COLOURS.sub("", message)
    if "\n" not in text:
        return text
    errors = list(_ERROR.finditer(text))
    if not errors:
        return text.splitlines()[0]
    return f"{errors[-1][1]}: {text[errors[-1].end() :].strip()}"
