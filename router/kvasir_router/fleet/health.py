"""Detects workers that answer badly, and limits the work that they get.

    healthy ──failures, slowness──▶ ejected ──time──▶ probing ──success──▶ slow_start ──time──▶ healthy
       ▲                                                                       ▲
       └──────── unresponsive, while the connection is broken ─────────────────┘ after more than a moment

A worker is judged by its effect on requests, not by its own reports: consecutive failures, and times to first
token far above the predicted ones, eject it, longer each time. After that, and when it joins, its share grows
gradually. A fault that half a fleet shares may not be the fault of a worker: if a signal would eject too many
(panic mode), the healthy workers are filled first, and what they have no room for is spread over all. Pure:
no clock, no randomness.
"""

from __future__ import annotations

import math

from kvasir.config.spec.deployment import HealthSpec
from kvasir.ports.router import HealthView
from kvasir_router.fleet.health_records import (
    FEWEST_SAMPLES,
    RATIONED,
    HealthLevel,
    Pool,
    Ramp,
    Slowness,
    WorkerHealth,
)

NOBODY: frozenset[str] = frozenset()

OVERLOADED = "worker_overloaded"
BREAK_S = 0.5
"""Pause for a worker that reports that it is full, which does not count as a failure."""
FIRST_SHARE = 0.1
"""First share of a worker that has served nothing, or has failed."""
SHARE_ON_RETURN = 0.5
"""First share of a worker that could not be reached; its cache and its engine are unchanged."""
RETURN_RATIO = 0.25
"""Duration of its ramp to the full share, as a fraction of a slow start."""
BLIP_S = 0.5
"""A connection that resumes within this time needs no ramp: its requests still run."""


class FleetHealth:
    """The health of all workers, by session id. Times are readings of one clock, in seconds.

    Obligations: while requests wait for room, at most the fraction `max_ejected` of a pool is avoided for
    ejections; a worker without further faults is healthy again after its ejection, one success and a slow
    start.
    """

    def __init__(self, spec: HealthSpec) -> None:
        self._spec = spec
        self._members: dict[str, WorkerHealth] = {}
        self._pools: dict[str, Pool] = {}
        self._crowded: set[str] = set()
        self._troubled: dict[str, WorkerHealth] = {}
        # Derived from the troubled workers on the first read after a change.
        self._stale = False
        self._pressed = False
        self._ejected = NOBODY
        self._limited: list[WorkerHealth] = []
        self._due = math.inf

    # -- events ----------------------------------------------------------------------------------

    def join(self, worker_id: str, pool: str, now: float) -> None:
        """A worker's session is up. It starts slowly if others of its pool have served for at least a slow
        start; workers that come up together are equally cold."""
        self.leave(worker_id)
        peers = self._pools.setdefault(pool, Pool(pool))
        member = WorkerHealth(worker_id, peers, joined_s=now, good_since_s=now)
        if peers.seasoned(now - self._spec.slow_start_s):
            member.ramp = self._ramp(now, FIRST_SHARE, self._spec.slow_start_s, "it has just joined")
        self._members[worker_id] = peers.members[worker_id] = member
        peers.enter(member)
        self._note(member)

    def leave(self, worker_id: str) -> None:
        """Remove a worker; harmless for an unknown one."""
        member = self._members.pop(worker_id, None)
        if member is None:
            return
        pool = member.pool
        pool.quit(member)
        del pool.members[worker_id]
        self._troubled.pop(worker_id, None)
        self._crowded.discard(worker_id)
        self._stale = True
        self._promote(pool)
        if not pool.members:
            del self._pools[pool.name]

    def loaded(self, worker_id: str, legs: int, now: float) -> None:
        """Set the number of this router's requests on the worker; call it on every change."""
        member = self._members.get(worker_id)
        if member is None:
            return
        started = legs - member.legs
        if member.level is HealthLevel.HEALTHY:
            member.pool.healthy_legs += started
        if started > 0 and self._troubled:
            self._ration(member, started, now)
        member.legs = legs
        member.old_legs = min(member.old_legs, legs)
        if legs >= self._spec.max_legs:
            self._crowded.add(worker_id)
        elif self._crowded:
            self._crowded.discard(worker_id)

    def succeeded(self, worker_id: str, now: float, slowness: float | None = None) -> None:
        """A leg gave its first token, or ended well. `slowness` is the time it took over the predicted time,
        or None without a prediction."""
        member = self._members.get(worker_id)
        if member is None:
            return
        member.failures = 0
        if slowness is not None:
            self._judge(member, slowness, now)
        if member.probing and member.out_until_s is None:
            member.probing = False
            why = f"it was ejected: {member.why}"
            member.credit, member.ramp = 1.0, self._ramp(now, FIRST_SHARE, self._spec.slow_start_s, why)
            self._place(member)

    def late(self, worker_id: str, now: float, slowness: float) -> None:
        """A leg was taken back that gave no token in `slowness` times the predicted time."""
        member = self._members.get(worker_id)
        if member is not None:
            self._judge(member, slowness, now)

    def failed(self, worker_id: str, code: str, now: float) -> None:
        """A leg failed by the worker's fault. A worker that reports overload is only paused."""
        member = self._members.get(worker_id)
        if member is None:
            return
        out = member.out_until_s is not None
        if code == OVERLOADED:
            if not out:
                member.out_until_s, member.brief = now + BREAK_S, True
                member.why = f"it answered {OVERLOADED}"
                self._place(member)
            return
        if out and not member.brief:
            # A leg from before the ejection.
            return
        member.failures += 1
        if member.probing:
            self._eject(member, f"it failed again, with {code}", now)
        elif member.failures >= self._spec.consecutive_failures:
            self._eject(member, f"{member.failures} requests in a row failed, the last with {code}", now)

    def interrupted(self, worker_id: str, now: float) -> None:
        """The worker's connection broke, or no message came in time."""
        member = self._members.get(worker_id)
        if member is not None and member.silent_since_s is None:
            member.silent_since_s = now
            self._place(member)

    def resumed(self, worker_id: str, now: float) -> None:
        """The worker's connection resumed, with everything that ran there."""
        member = self._members.get(worker_id)
        if member is None or member.silent_since_s is None:
            return
        silent_s = now - member.silent_since_s
        member.silent_since_s = None
        member.failures = 0
        if silent_s > BLIP_S and member.derived is HealthLevel.HEALTHY:
            lasts_s = self._spec.slow_start_s * RETURN_RATIO
            why = f"it could not be reached for {silent_s:.1f} s"
            member.credit, member.ramp = 1.0, self._ramp(now, SHARE_ON_RETURN, lasts_s, why)
        self._place(member)

    def tick(self, now: float) -> None:
        """Time has passed; due when `next_due` is reached."""
        for member in [each for each in self._troubled.values() if each.next_due <= now]:
            if member.out_until_s is not None and member.out_until_s <= now:
                member.out_until_s = None
                if not member.brief:
                    member.probing, member.old_legs = True, member.legs
                member.brief = False
            if member.ramp is not None and member.ramp.until_s <= now:
                member.ramp = None
            self._place(member)

    def press(self, waiting: bool) -> bool:
        """Set whether requests wait for room. Return whether more workers may be used than before."""
        if waiting is self._pressed:
            return False
        self._pressed = waiting
        return waiting and bool(self._troubled)

    # -- results ---------------------------------------------------------------------------------

    def next_due(self) -> float | None:
        """Return when a `tick` will change something; None if time alone changes nothing."""
        if self._stale:
            self._recompute()
        return None if self._due == math.inf else self._due

    def avoided(self, now: float) -> frozenset[str]:
        """Return the workers that get no work while others can take it. Cheap while all are healthy, and then
        always the same empty set."""
        if not (self._troubled or self._crowded):
            return NOBODY
        if self._stale:
            self._recompute()
        if self._due <= now:
            self.tick(now)
            self._recompute()
        full = [each.worker_id for each in self._limited if self._waits(each) or each.has_enough(now)]
        if not full and not self._crowded:
            return self._ejected
        return self._ejected.union(full, self._crowded)

    def panicking(self, pool: str) -> bool:
        """Whether ejections of the pool are ignored because there are too many."""
        known = self._pools.get(pool)
        return known is not None and known.panics(self._spec.max_ejected)

    def view(self, worker_id: str, now: float) -> HealthView:
        """Return the health for status and metrics; that of a healthy worker for an unknown one."""
        member = self._members.get(worker_id)
        if member is None:
            return HealthView()
        level, panic = member.level, self.panicking(member.pool.name)
        for_s, share, why = 0.0, member.share(now), ""
        if level is HealthLevel.SILENT:
            share, why = 0.0, f"it cannot be reached, for {now - (member.silent_since_s or now):.1f} s"
        elif level is HealthLevel.EJECTED:
            used = panic and not self._waits(member)
            for_s, share, why = max(0.0, member.next_due - now), float(used), member.why
        elif level is HealthLevel.PROBING:
            share, why = FIRST_SHARE, f"one request at a time until one succeeds; {member.why}"
        elif member.ramp is not None:
            for_s, why = max(0.0, member.ramp.until_s - now), member.ramp.why
        elif worker_id in self._crowded:
            why = f"{member.legs} requests run there, which is one router's limit for a worker"
        return HealthView(level, why, for_s, share, member.ejections, panic)

    def _waits(self, member: WorkerHealth) -> bool:
        """Whether an ejected worker of a pool in panic gets nothing, because healthy ones have room."""
        if member.level is not HealthLevel.EJECTED or self._pressed:
            return False
        healthy = member.pool.counts[HealthLevel.HEALTHY]
        return healthy > 0 and (not self._crowded or healthy > member.pool.crowded(self._crowded))

    # -- judgement -------------------------------------------------------------------------------

    def _judge(self, member: WorkerHealth, slowness: float, now: float) -> None:
        """Eject a worker that is far slower than predicted, unless its peers are too."""
        if member.out_until_s is not None:
            return
        member.slowness.observe(slowness)
        mean, most = member.slowness.ratio, self._spec.slow_ratio
        if member.slowness.samples < FEWEST_SAMPLES or mean < most:
            return
        peers = member.pool.slowness_of_peers(member)
        if peers is not None and mean >= most * peers:
            why = f"first tokens took {mean:.1f} times the predicted time, and {peers:.1f} times on its peers"
            self._eject(member, why, now)

    def _eject(self, member: WorkerHealth, why: str, now: float) -> None:
        spec = self._spec
        forgiven = int((now - member.good_since_s) / spec.max_ejection_s)
        member.growth = max(0, member.growth - max(0, forgiven))
        lasts_s = spec.ejection_s * 2.0**member.growth
        if lasts_s < spec.max_ejection_s:
            member.growth += 1
        member.ejections += 1
        member.failures = 0
        member.why, member.brief, member.probing, member.ramp = why, False, False, None
        member.slowness = Slowness()
        member.credit = 1.0
        member.out_until_s = member.good_since_s = now + min(lasts_s, spec.max_ejection_s)
        self._place(member)

    def _ration(self, member: WorkerHealth, started: int, now: float) -> None:
        """Grant rationed workers their part of the requests that healthy workers start."""
        pool = member.pool
        if member.level in RATIONED:
            member.spend(started)
        elif member.level is HealthLevel.HEALTHY and any(pool.counts[each] for each in RATIONED):
            each = started / pool.counts[HealthLevel.HEALTHY]
            for peer in self._troubled.values():
                if peer.pool is pool and peer.level in RATIONED:
                    peer.earn(each, now)

    @staticmethod
    def _ramp(now: float, share: float, lasts_s: float, why: str) -> Ramp | None:
        return Ramp(share, now, now + lasts_s, why) if lasts_s > 0.0 else None

    def _place(self, member: WorkerHealth) -> None:
        """Update a member's level from its record."""
        member.pool.quit(member)
        member.pool.enter(member)
        self._note(member)
        self._promote(member.pool)

    def _promote(self, pool: Pool) -> None:
        """Raise members to healthy if no member of the pool has a full share."""
        if not pool.counts[HealthLevel.HEALTHY]:
            for member in pool.slow_starters():
                member.ramp = None
                pool.quit(member)
                pool.enter(member)
                self._note(member)

    def _note(self, member: WorkerHealth) -> None:
        self._stale = True
        if member.level is HealthLevel.HEALTHY:
            self._troubled.pop(member.worker_id, None)
        else:
            self._troubled[member.worker_id] = member

    def _recompute(self) -> None:
        """Recompute the avoided and the rationed workers, and the next due time."""
        self._stale = False
        panics = {pool.name: pool.panics(self._spec.max_ejected) for pool in self._pools.values()}
        ejected = frozenset(
            worker_id
            for worker_id, member in self._troubled.items()
            if member.level is HealthLevel.EJECTED and not panics[member.pool.name]
        )
        self._ejected = ejected or NOBODY
        self._limited = [
            member
            for member in self._troubled.values()
            if member.level in (HealthLevel.PROBING, HealthLevel.SLOW_START)
            or (member.level is HealthLevel.EJECTED and panics[member.pool.name])
        ]
        self._due = min((member.next_due for member in self._troubled.values()), default=math.inf)
