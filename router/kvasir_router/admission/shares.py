"""Finds tenants that hold more than their share of the running work, so that room is kept for the others.

A tenant that filled every place would make the next tenant wait for the end of a request, however fair the
queue is. Tenants above their share are therefore limited to a little less than the capacity
(`AdmissionRules.spare`), with fewer prompts sent ahead (`AdmissionRules.ahead_shared_s`). Shares are among
the tenants of one priority class; while a more urgent class is active, all tenants of a class are above
theirs. A single tenant has no limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MEMORY_S = 10.0
"""How long a tenant counts as active after its last request."""
_SWEEP_S = 1.0


@dataclass(slots=True)
class _Class:
    """Total weight and held cost of the tenants of a class."""

    weights: float = 0.0
    held: int = 0


@dataclass(slots=True)
class _Holder:
    known: _Class
    weight: float
    seen_s: float
    held: int = 0
    running: int = 0


class Shares:
    """The cost of running requests by tenant and class. `waiting` returns the number of a tenant's waiting
    requests: a tenant with any is active."""

    def __init__(self, waiting: Callable[[str], int]) -> None:
        self._waiting = waiting
        self._holders: dict[tuple[int, str], _Holder] = {}
        self._classes: dict[int, _Class] = {}
        self._most_urgent = 0
        self._swept_s = 0.0

    def seen(self, level: int, tenant: str, weight: float, now: float) -> None:
        """The tenant sent a request."""
        holder = self._holders.get((level, tenant))
        if holder is None:
            known = self._classes.setdefault(level, _Class())
            self._holders[level, tenant] = _Holder(known, weight, now)
            known.weights += weight
            self._most_urgent = min(self._classes)
        else:
            holder.seen_s = now
        if now - self._swept_s > _SWEEP_S:
            self._sweep(now)

    @property
    def several(self) -> bool:
        """Whether more than one tenant is active."""
        return len(self._holders) > 1

    def over(self, level: int, tenant: str) -> bool:
        """Whether the tenant holds more than its share among the active tenants."""
        if len(self._holders) < 2:
            return False
        holder = self._holders.get((level, tenant))
        if holder is None or level > self._most_urgent:
            return True
        known = holder.known
        return holder.weight < known.weights and holder.held * known.weights > holder.weight * known.held

    def hold(self, level: int, tenant: str, cost: int) -> None:
        """A request of an active tenant starts."""
        holder = self._holders[level, tenant]
        holder.held += cost
        holder.running += 1
        holder.known.held += cost

    def release(self, level: int, tenant: str, cost: int) -> None:
        """The request ended."""
        holder = self._holders[level, tenant]
        holder.held -= cost
        holder.running -= 1
        holder.known.held -= cost

    def weights(self) -> dict[str, float]:
        """Weights of the active tenants."""
        return {tenant: holder.weight for (_, tenant), holder in self._holders.items()}

    @property
    def running(self) -> int:
        """Number of running requests; for checks."""
        return sum(holder.running for holder in self._holders.values())

    def _sweep(self, now: float) -> None:
        """Drop the inactive tenants."""
        self._swept_s = now
        gone = [
            key
            for key, holder in self._holders.items()
            if not holder.running and now - holder.seen_s > MEMORY_S and not self._waiting(key[1])
        ]
        for key in gone:
            del self._holders[key]
        if gone:
            self._recount()

    def _recount(self) -> None:
        for known in self._classes.values():
            known.weights = 0.0
        for holder in self._holders.values():
            holder.known.weights += holder.weight
        live = {level for level, _ in self._holders}
        self._classes = {level: known for level, known in self._classes.items() if level in live}
        self._most_urgent = min(live, default=0)
