"""Admission decides, before a request reaches a worker, whether it starts, waits or is refused.

    arrives ──▶ empty queue and room ──▶ starts
       │
       ├──▶ refused: the wait would be too long, or the queue is full, for all tenants or for its own
       └──▶ queued until there is room ──▶ starts
            parked while no worker serves it ──▶ queued

A request that has started is not judged again: after failover it still counts in its tenant's share.
Decisions are pure; the caller passes the time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum, auto

from kvasir.core.invariants import require
from kvasir.core.requests import Request
from kvasir.ports.router import AdmissionView
from kvasir.ports.routing import Plan
from kvasir_router.admission.contract import AdmissionRules, AdmissionTicket
from kvasir_router.admission.fair_admission import FairAdmission
from kvasir_router.admission.fair_queue import LANES, LONG, SHORT, Key, key_of
from kvasir_router.admission.room import SPARE, Room
from kvasir_router.admission.waits import no_spare_capacity
from kvasir_router.fleet.fleet import Fleet


class _Shut(Enum):
    """For which requests there is no room."""

    ALL = auto()
    TENANT = auto()
    LONG = auto()


class Admission(FairAdmission):
    """The queue of a router, and the rules by which requests leave it.

    Obligations: a refused request leaves nothing behind but the record that its tenant is active; a waiting
    request starts, unless it ends first, once there is room and its turn has come; `ended` gives back all
    that `begins` takes.
    """

    def __init__(self, fleet: Fleet, rules: AdmissionRules) -> None:
        super().__init__(rules, lambda request: fleet.output_tokens(request) * request.sampling.n)
        self._fleet = fleet
        self._parked: dict[str, AdmissionTicket] = {}
        self._room = Room(fleet.columns, fleet.workers, rules, fleet.gap)
        self._long_kv = 0
        self._long_prompts: set[str] = set()
        self._known = -1
        self._avoided: frozenset[str] = frozenset()
        self._tried = -1
        self._retry_s: float | None = None

    # -- waiting requests --------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._queue) + len(self._parked)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._queue or request_id in self._parked

    def __iter__(self) -> Iterator[str]:
        yield from self._queue
        yield from self._parked

    @property
    def held_back(self) -> bool:
        """Whether requests wait for room on workers that serve them."""
        return len(self._queue) > 0

    def parked(self, ticket: AdmissionTicket) -> bool:
        """Whether the request waits because no worker serves it."""
        return ticket.request_id in self._parked

    # -- arrivals --------------------------------------------------------------------------------

    def may_begin(self, ticket: AdmissionTicket, now: float) -> bool:
        """Whether the request can start at once: nothing waits before it, and there is room."""
        waiting = self._queue.waiting
        if waiting[False] or ((ticket.long or ticket.spare) and waiting[True]):
            return False
        return self._shut(ticket, now) is None

    def wait(self, ticket: AdmissionTicket, now: float, *, served: bool) -> None:
        """Queue a request, or park it if no worker serves it. Raises CapacityError, without any change."""
        if ticket.spare:
            raise no_spare_capacity()
        self.waits.check_queue_limits(ticket, len(self), now)
        if served:
            own_s = self._room.prefill_s(ticket.fresh_tokens) if ticket.long else 0.0
            self.waits.check_wait(ticket, now, own_s)
            self._add(ticket, now)
        else:
            self._parked[ticket.request_id] = ticket

    # -- queued and parked -------------------------------------------------------------------------

    def park(self, ticket: AdmissionTicket) -> None:
        """Park a request that no worker serves, until the workers change. It may have started before."""
        if ticket.waiting:
            self._queue.remove(ticket)
        self._parked[ticket.request_id] = ticket

    def unpark(self, now: float) -> list[AdmissionTicket]:
        """Queue the parked requests after the serving workers changed. Return those that had started before:
        they are not judged again, and the caller starts or parks them."""
        parked, self._parked = self._parked, {}
        for ticket in parked.values():
            if not ticket.holds:
                self._add(ticket, now)
        return [ticket for ticket in parked.values() if ticket.holds]

    def due(self, now: float) -> bool:
        """Whether `next` may return a request: one waits, and something may have made room."""
        if not len(self._queue):
            return False
        if self._tried != self._fleet.eased or (self._retry_s is not None and self._retry_s <= now):
            self._tried, self._retry_s = self._fleet.eased, None
            return True
        return False

    def next(self, now: float) -> AdmissionTicket | None:
        """Return the request that starts next; it stays queued until `begins` or `park`."""
        if self._room.booking is not None:
            # KV that is booked for a long prompt is withheld from the requests before it.
            ticket = self._queue.next(LONG)
            if ticket is not None and self._shut(ticket, now) is None:
                return ticket
        lanes: tuple[bool, ...] = LANES
        without = set[Key]()
        while (ticket := self._queue.next(lanes, without=without)) is not None:
            shut = self._shut(ticket, now)
            if shut is None:
                return ticket
            if shut is _Shut.ALL:
                return None
            if shut is _Shut.LONG:
                lanes = SHORT
            else:
                without.add(key_of(ticket))
        return None

    # -- start and end -----------------------------------------------------------------------------

    def crowded(self, ticket: AdmissionTicket, request: Request, plan: Plan, now: float) -> frozenset[str]:
        """Return the workers without room for what the plan takes, or none if its own workers have room.
        While tenants compete, include workers on which the request would wait longer than on others."""
        need = self._fleet.kv_need(request, plan)
        found = self._room.crowded(plan, ticket, need, over=self._over(ticket))
        if found:
            ticket.kv_least = max(ticket.kv_least, need[0])
        if self._shares.several and len(self._queue) and not ticket.spare:
            found |= self._room.busier(plan, ticket, self._rules.ahead_shared_s, now)
        return found

    def takes(self, ticket: AdmissionTicket) -> bool:
        """Whether any place has room for the request's least KV."""
        return self._room.decodes(ticket, ticket.kv_least, over=self._over(ticket))

    def begins(self, ticket: AdmissionTicket, now: float) -> None:
        """The request is sent to workers, for the first time or again."""
        self._parked.pop(ticket.request_id, None)
        if ticket.long:
            self._begins_long(ticket)
        super().begins(ticket, now)

    def computed(self, ticket: AdmissionTicket) -> None:
        """The prompt has been computed."""
        self._long_prompts.discard(ticket.request_id)

    def first_token(self, ticket: AdmissionTicket, seconds: float | None) -> None:
        """The first token came `seconds` after the request began; None if that is not typical."""
        super().first_token(ticket, seconds)
        self.computed(ticket)

    def ended(self, ticket: AdmissionTicket) -> None:
        """The request ended, queued, parked or running."""
        self._parked.pop(ticket.request_id, None)
        self.computed(ticket)
        self._long_kv -= ticket.cost if ticket.long and ticket.holds else 0
        super().ended(ticket)
        self._tried = -1

    # -- time ------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Measure the queue and update the brown-out; called after every event."""
        if self._watch.idle:
            return
        super().tick(now)
        if not self._queue.waiting[True]:
            self._room.booking = None

    def next_due(self) -> float | None:
        """The time at which something may change without an event."""
        due = (self._retry_s if len(self._queue) else None, super().next_due())
        return min((when for when in due if when is not None), default=None)

    def view(self, now: float) -> AdmissionView:
        """Return the state for metrics and edges."""
        self._renewed(now)
        return replace(
            super().view(now),
            parked=len(self._parked),
            reserved_tokens=self._room.reserved_tokens(),
            kv_tokens=self._room.kv_tokens,
        )

    def check(self, holding: int) -> None:
        """Raise AssertionError if the counts disagree, or if not `holding` requests have begun."""
        super().check(holding)
        require(not any(ticket.waiting for ticket in self._parked.values()), "both queued and parked")
        require(self._long_kv >= 0, "negative KV of long prompts")

    # -- room ------------------------------------------------------------------------------------

    def _shut(self, ticket: AdmissionTicket, now: float) -> _Shut | None:
        """For which requests there is no room; None if there is room for this one."""
        room = self._renewed(now)
        over = self._over(ticket)
        ahead_s = self._rules.ahead_shared_s if over else self._rules.ahead_s
        shut = _Shut.TENANT if over else _Shut.ALL
        if ticket.long and self._long_is_shut(ticket, room):
            return _Shut.LONG
        if not room.computes(ticket, ahead_s, now, over=over):
            self._retry_at(room.opens_at(ticket, ahead_s, now, over=over))
            return shut
        if not room.decodes(ticket, ticket.kv_least, over=over):
            if not ticket.long:
                return shut
            room.book(ticket.cost)
            return _Shut.LONG
        return None

    def _long_is_shut(self, ticket: AdmissionTicket, room: Room) -> bool:
        rules = self._rules
        if ticket.fresh_tokens >= rules.long_tokens:
            most = max(1, int(rules.long_share * room.places[0]))
            if len(self._long_prompts) >= most:
                return True
        return bool(self._long_kv) and self._long_kv + ticket.cost > rules.long_share * room.kv_tokens

    def _begins_long(self, ticket: AdmissionTicket) -> None:
        self._room.booking = None
        if ticket.fresh_tokens >= self._rules.long_tokens:
            self._long_prompts.add(ticket.request_id)
        if not ticket.holds:
            self._long_kv += ticket.cost

    def _add(self, ticket: AdmissionTicket, now: float) -> None:
        super()._add(ticket, now)
        self._tried = -1

    def _retry_at(self, when: float | None) -> None:
        if when is not None and (self._retry_s is None or when < self._retry_s):
            self._retry_s = when

    def _renewed(self, now: float) -> Room:
        fleet = self._fleet
        avoided = fleet.health.avoided(now)
        if fleet.changed != self._known or avoided != self._avoided:
            self._known, self._avoided = fleet.changed, avoided
            before = self._room.places
            self._room.renew(avoided)
            sizes = [new / old for new, old in zip(self._room.places, before, strict=True) if new and old]
            # If two pools change at once, use the larger change.
            factor = max(sizes, key=lambda size: abs(math.log(size)), default=1.0)
            self._resized(factor)
        return self._room

    def _over(self, ticket: AdmissionTicket) -> int:
        """Which limits of places hold for the request: 1 if its tenant is above its share, else 0; SPARE for
        spare capacity only."""
        return SPARE if ticket.spare else self._shares.over(*self._holder(ticket))
