"""Which workers answer badly, and how much they are given meanwhile.

    healthy ──failures, slowness──▶ ejected ──time──▶ probing ──success──▶ slow_start ──time──▶ healthy
       ▲                                                                       ▲
       └───────────── silent, where the connection is broken ──────────────────┘ after more than a moment

A worker is judged by what it does to requests, not by what it says of itself: failures in a row and times
to first token that are far from those foreseen eject it for a while, each time longer; after that, and when
it joins, it gets its share by and by. What half a fleet has in common is no worker's fault, so that a signal
which says it of too many is not believed: all are used then, evenly. Pure: no clock, no chance.
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
"""A worker that says itself that it is full is left alone so long, and is not the worse for it."""
FIRST_SHARE = 0.1
"""What a worker begins with that has done nothing yet, or nothing well."""
SHARE_ON_RETURN = 0.5
"""What a worker begins with that could not be reached; its cache and its engine are as they were."""
RETURN_RATIO = 0.25
"""How long it takes to its full share then, as a part of a slow start."""
BLIP_S = 0.5
"""A connection that is back sooner finds its requests where they were: there is no gap to fill slowly."""


class FleetHealth:
    """The health of all workers, by the id of their sessions. Times are readings of one clock, in seconds.

    Obligations: of a pool, at most the fraction `max_ejected` is avoided for being ejected; a worker to which
    nothing bad happens any more is healthy again after its ejection, one success and a slow start.
    """

    def __init__(self, spec: HealthSpec) -> None:
        self._spec = spec
        self._members: dict[str, WorkerHealth] = {}
        self._pools: dict[str, Pool] = {}
        self._crowded: set[str] = set()
        self._troubled: dict[str, WorkerHealth] = {}
        # Made from the troubled ones when they are asked for after a change.
        self._stale = False
        self._ejected = NOBODY
        self._limited: list[WorkerHealth] = []
        self._due = math.inf

    # -- what happens ----------------------------------------------------------------------------

    def join(self, worker_id: str, pool: str, now: float) -> None:
        """A worker's session is up. It starts slowly where others of its pool have served for as long as that
        takes; those that come up together are all as cold."""
        self.leave(worker_id)
        peers = self._pools.setdefault(pool, Pool(pool))
        member = WorkerHealth(worker_id, peers, joined_s=now, good_since_s=now)
        if peers.seasoned(now - self._spec.slow_start_s):
            member.ramp = self._ramp(now, FIRST_SHARE, self._spec.slow_start_s, "it has just joined")
        self._members[worker_id] = peers.members[worker_id] = member
        peers.enter(member)
        self._note(member)

    def leave(self, worker_id: str) -> None:
        """The worker is gone. Harmless for one that is not known."""
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
        """How many requests this router has on the worker; to be told of every change."""
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
        """A leg gave its first token, or ended well. `slowness` is what it took over what was foreseen, None
        where nothing was."""
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
        """A leg was taken back that had given nothing in `slowness` times what was foreseen."""
        member = self._members.get(worker_id)
        if member is not None:
            self._judge(member, slowness, now)

    def failed(self, worker_id: str, code: str, now: float) -> None:
        """A leg failed by the worker's fault. One that is overloaded is only left alone for a moment."""
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
            # Of a request from before it was ejected.
            return
        member.failures += 1
        if member.probing:
            self._eject(member, f"it failed again, with {code}", now)
        elif member.failures >= self._spec.consecutive_failures:
            self._eject(member, f"{member.failures} requests in a row failed, the last with {code}", now)

    def interrupted(self, worker_id: str, now: float) -> None:
        """Its connection broke, or it fell silent."""
        member = self._members.get(worker_id)
        if member is not None and member.silent_since_s is None:
            member.silent_since_s = now
            self._place(member)

    def resumed(self, worker_id: str, now: float) -> None:
        """Its connection is back, with everything that ran there."""
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
        """Time has passed; due whenever `next_due` is reached."""
        for member in [each for each in self._troubled.values() if each.next_due <= now]:
            if member.out_until_s is not None and member.out_until_s <= now:
                member.out_until_s = None
                if not member.brief:
                    member.probing, member.old_legs = True, member.legs
                member.brief = False
            if member.ramp is not None and member.ramp.until_s <= now:
                member.ramp = None
            self._place(member)

    # -- what follows ----------------------------------------------------------------------------

    def next_due(self) -> float | None:
        """When a `tick` will change something; None when nothing waits for time."""
        if self._stale:
            self._sort_out()
        return None if self._due == math.inf else self._due

    def avoided(self, now: float) -> frozenset[str]:
        """Workers that are to be given nothing while others can take it. Cheap, and always the same empty
        set, while all is well."""
        if not (self._troubled or self._crowded):
            return NOBODY
        if self._stale:
            self._sort_out()
        if self._due <= now:
            self.tick(now)
            self._sort_out()
        full = [member.worker_id for member in self._limited if member.has_enough(now)]
        if not full and not self._crowded:
            return self._ejected
        return self._ejected.union(full, self._crowded)

    def panicking(self, pool: str) -> bool:
        """Whether the signal is not believed there, because it says too much."""
        known = self._pools.get(pool)
        return known is not None and known.panics(self._spec.max_ejected)

    def view(self, worker_id: str, now: float) -> HealthView:
        """As status and metrics show it; a healthy one for a worker that is not known."""
        member = self._members.get(worker_id)
        if member is None:
            return HealthView()
        level, panic = member.level, self.panicking(member.pool.name)
        for_s, share, why = 0.0, member.share(now), ""
        if level is HealthLevel.SILENT:
            share, why = 0.0, f"it cannot be reached, for {now - (member.silent_since_s or now):.1f} s"
        elif level is HealthLevel.EJECTED:
            for_s, share, why = max(0.0, member.next_due - now), 1.0 if panic else 0.0, member.why
        elif level is HealthLevel.PROBING:
            share, why = FIRST_SHARE, f"one request at a time until one succeeds; {member.why}"
        elif member.ramp is not None:
            for_s, why = max(0.0, member.ramp.until_s - now), member.ramp.why
        elif worker_id in self._crowded:
            why = f"{member.legs} requests run there, the most that one router gives a worker"
        return HealthView(level, why, for_s, share, member.ejections, panic)

    # -- verdicts --------------------------------------------------------------------------------

    def _judge(self, member: WorkerHealth, slowness: float, now: float) -> None:
        """Eject a worker that is far slower than foreseen, unless its peers are too."""
        if member.out_until_s is not None:
            return
        member.slowness.observe(slowness)
        mean, most = member.slowness.ratio, self._spec.slow_ratio
        if member.slowness.samples < FEWEST_SAMPLES or mean < most:
            return
        peers = member.pool.slowness_of_peers(member)
        if peers is not None and mean >= most * peers:
            why = f"first tokens took {mean:.1f} times what was foreseen, and {peers:.1f} times on its peers"
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
        """What healthy workers begin is what others may begin as much of, or a part."""
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
        """Let a member's standing follow what has become of it."""
        member.pool.quit(member)
        member.pool.enter(member)
        self._note(member)
        self._promote(member.pool)

    def _promote(self, pool: Pool) -> None:
        """Where nobody has a full share, there is nobody to have patience for."""
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

    def _sort_out(self) -> None:
        """Whom to avoid, whom to ration, and when to look again."""
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
