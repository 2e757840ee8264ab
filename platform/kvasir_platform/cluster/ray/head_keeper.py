"""Restarts the GCS of Ray's head when its process fails while workers serve.

Replicas, router and streams continue without it, but Ray's own processes exit after 60 s, so it must be
restarted before. A node whose raylet has ended is lost with its replicas; the supervisor reports that.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol

log = logging.getLogger(__name__)


class Head(Protocol):
    """The part of kvasir_platform.cluster.ray.head.RayHead that is needed."""

    @property
    def alive(self) -> bool: ...

    @property
    def gcs_alive(self) -> bool: ...

    def restart_gcs(self) -> None: ...


@dataclass(slots=True)
class RestartBackoff:
    """Restart policy: at once, then after growing delays, at most `limit` times within `window_s` seconds.
    The delays add up to less than the 60 s for which Ray waits."""

    limit: int = 6
    window_s: float = 300.0
    pause_s: float = 1.0
    _at: list[float] = field(default_factory=list)

    def due(self, now: float) -> float | None:
        """Return when the next restart is allowed; None after too many."""
        self._at = [at for at in self._at if now - at < self.window_s]
        if len(self._at) >= self.limit:
            return None
        if not self._at:
            return now
        return max(now, self._at[-1] + self.pause_s * 2.0 ** (len(self._at) - 1))

    def note(self, now: float) -> None:
        """Record a restart."""
        self._at.append(now)


class HeadKeeper:
    """Call `step` a few times a second. `failure` is why the head cannot be kept, and is permanent."""

    def __init__(self, head: Head, restarts: RestartBackoff | None = None) -> None:
        self._head = head
        self._restarts = restarts or RestartBackoff()
        self.failure: str | None = None
        self.restarted = 0

    def step(self, now: float) -> None:
        """Check the GCS, and restart it if it has ended. `now` in seconds."""
        if self.failure is not None:
            return
        if not self._head.alive:
            self.failure = "Ray's node (raylet) has ended, and every replica on it; restart the deployment"
            return
        if self._head.gcs_alive:
            return
        due = self._restarts.due(now)
        if due is None:
            self.failure = (
                f"Ray's head (GCS) ended {self._restarts.limit} times within "
                f"{self._restarts.window_s:.0f} s; its log says why (gcs_server.out). If it keeps its state "
                "in Redis (ray.head_redis_url), check that Redis answers. Restart the deployment: Ray ends "
                "the replicas 60 s after its head"
            )
        elif now >= due:
            log.warning("Ray's head (GCS) has ended and is restarted; the workers continue to serve")
            self._restarts.note(now)
            self.restarted += 1
            self._head.restart_gcs()
