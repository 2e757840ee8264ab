"""Which workers answer badly, and how much they are given meanwhile.

A worker is judged by what it does to requests, not by what it says of itself: failures in a row and times
to first token that are far from those foreseen eject it for a while, each time longer; after that, and when
it joins, it gets its share by and by. What half a fleet has in common is no worker's fault, so that a signal
which says it of too many is not believed. Pure: it reads no clock and draws nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvasir.config.spec import HealthSpec
from kvasir.ports.router import HealthView

NOBODY: frozenset[str] = frozenset()


class Health:
    """The health of all workers, by the id of their sessions. Times are readings of one clock, in seconds."""

    def __init__(self, spec: HealthSpec) -> None:
        self._spec = spec

    def join(self, worker_id: str, pool: str, now: float) -> None:
        """A worker's session is up. It starts slowly where others of its pool serve already."""

    def leave(self, worker_id: str) -> None:
        """The worker is gone. Harmless for one that is not known."""

    def succeeded(self, worker_id: str, now: float, slowness: float | None = None) -> None:
        """A leg gave its first token, or ended well. `slowness` is what it took over what was foreseen, None
        where nothing was."""

    def failed(self, worker_id: str, code: str, now: float) -> None:
        """A leg failed by the worker's fault."""

    def interrupted(self, worker_id: str, now: float) -> None:
        """Its connection broke, or it fell silent."""

    def resumed(self, worker_id: str, now: float) -> None:
        """Its connection is back, with everything that ran there."""

    def tick(self, now: float) -> None:
        """Time has passed; due whenever `next_due` is reached."""

    def next_due(self) -> float | None:
        """When a `tick` will change something; None when nothing waits for time."""
        return None

    def avoided(self, legs: Mapping[str, int], now: float) -> frozenset[str]:
        """Workers that are to be given nothing while others can take it. `legs` counts what runs on each.
        Cheap, and always the same empty set, while all is well."""
        return NOBODY

    def panicking(self, pool: str) -> bool:
        """Whether the signal is not believed there, because it says too much."""
        return False

    def view(self, worker_id: str, now: float) -> HealthView:
        """As status and metrics show it."""
        return HealthView()
