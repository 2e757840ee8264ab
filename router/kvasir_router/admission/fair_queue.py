"""The order of waiting requests: priority classes, and tenants by weight within a class.

Classes are strict except for age: a request that has waited `ageing_s` is as urgent as a new one of the next
class (`AdmissionTicket.urgency`). Within a class each tenant has a virtual clock, which advances by the cost
of its started requests over its weight; the slowest clock is next (start-time fair queueing, Goyal et al.,
1996; stride scheduling, Waldspurger, 1995). A tenant that returns sets its clock to that of its class, so
that idle time earns no burst. Of two waiting tenants, neither gets more than its share plus one request.

Long prompts have a lane of their own, which can be closed while other requests start. Add, take and remove
cost O(log n).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from kvasir_router.admission.contract import AdmissionTicket

SHORT, LONG = (False,), (True,)
LANES = (False, True)
_SLACK = 64
"""Number of dead entries that heaps and tables may hold beyond twice the live ones."""

Key = tuple[int, str]
"""A tenant's requests of one class."""
_Tickets = list[tuple[float, int, AdmissionTicket]]


def key_of(ticket: AdmissionTicket) -> Key:
    """Return the key of a ticket."""
    return ticket.level, ticket.tenant


def _live(heap: _Tickets) -> AdmissionTicket | None:
    """The first ticket that still waits."""
    while heap and not heap[0][2].waiting:
        heapq.heappop(heap)
    return heap[0][2] if heap else None


def _compact(heap: _Tickets, live: int) -> None:
    if len(heap) > _SLACK + 2 * live:
        heap[:] = [entry for entry in heap if entry[2].waiting]
        heapq.heapify(heap)


@dataclass(slots=True)
class _Flow:
    """One tenant in one class. `clock` is its virtual time, `heads` its requests by lane and urgency,
    `waiting` their number and `cost` their total cost. `short` is the cost of those that are not long, and
    `pressing` the same divided by each one's promised time to first token. `listed`: whether the class has
    the flow in `order`, by lane."""

    key: Key
    weight: float
    clock: float
    heads: tuple[_Tickets, _Tickets] = field(default_factory=lambda: ([], []))
    listed: list[bool] = field(default_factory=lambda: [False, False])
    waiting: int = 0
    cost: int = 0
    short: int = 0
    pressing: float = 0.0


@dataclass(slots=True)
class _Class:
    """One priority class. `clock` is the virtual time of the tenant served last. `order` has flows by lane
    and clock; an outdated clock is corrected when its flow reaches the front. `oldest` has requests by lane
    and urgency."""

    level: int
    clock: float = 0.0
    flows: dict[Key, _Flow] = field(default_factory=dict)
    order: tuple[list[tuple[float, int, _Flow]], ...] = field(default_factory=lambda: ([], []))
    oldest: tuple[_Tickets, _Tickets] = field(default_factory=lambda: ([], []))
    waiting: int = 0
    cost: int = 0

    def first(self, lane: bool, without: Set[Key]) -> _Flow | None:
        """The flow that is next among those with a request in the lane, except `without`."""
        if without:
            flows = (flow for flow in self.flows.values() if flow.waiting and flow.key not in without)
            return min((f for f in flows if _live(f.heads[lane])), key=lambda f: f.clock, default=None)
        order = self.order[lane]
        while order:
            clock, number, flow = order[0]
            if _live(flow.heads[lane]) is None:
                heapq.heappop(order)
                flow.listed[lane] = False
            elif clock < flow.clock:
                heapq.heapreplace(order, (flow.clock, number, flow))
            else:
                return flow
        return None

    def serve(self, flow: _Flow, cost: int) -> None:
        """Advance the flow's clock by the cost of a request."""
        self.clock = flow.clock = max(flow.clock, self.clock)
        flow.clock += cost / flow.weight

    def sweep(self) -> None:
        """Drop dead entries once they outnumber live ones."""
        for heap in self.oldest:
            _compact(heap, self.waiting)
        if len(self.flows) > _SLACK + 2 * self.waiting:
            self.flows = {
                key: flow for key, flow in self.flows.items() if flow.waiting or flow.clock > self.clock
            }


class FairQueue:
    """Requests that wait. With `class_factor` classes are weighted: each weighs `class_factor` times the
    next."""

    def __init__(self, *, class_factor: float | None = None) -> None:
        self._classes: dict[int, _Class] = {}
        self._class_factor = class_factor
        self._numbers = itertools.count()
        self._tickets: dict[str, AdmissionTicket] = {}
        self._of_tenant: dict[str, int] = {}
        self.waiting = [0, 0]
        """Number of waiting requests by lane."""
        self.costs = [0, 0]
        """Their cost by lane."""
        self.tokens = 0
        """Their prompt tokens in both lanes."""

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._tickets

    def __iter__(self) -> Iterator[str]:
        return iter(self._tickets)

    def of_tenant(self, tenant: str) -> int:
        """Number of a tenant's waiting requests."""
        return self._of_tenant.get(tenant, 0)

    def tenants(self) -> set[str]:
        """The tenants with waiting requests."""
        return set(self._of_tenant)

    def charge(self, ticket: AdmissionTicket) -> None:
        """Charge a request that starts without waiting."""
        known, flow = self._place(ticket)
        known.serve(flow, ticket.cost)
        known.sweep()

    def add(self, ticket: AdmissionTicket) -> None:
        """Queue a request."""
        known, flow = self._place(ticket)
        if not flow.waiting:
            flow.clock = max(flow.clock, known.clock)
        lane, number = ticket.long, next(self._numbers)
        ticket.waiting = True
        if not flow.listed[lane]:
            flow.listed[lane] = True
            heapq.heappush(known.order[lane], (flow.clock, number, flow))
        heapq.heappush(flow.heads[lane], (ticket.urgency, number, ticket))
        heapq.heappush(known.oldest[lane], (ticket.urgency, number, ticket))
        self._tickets[ticket.request_id] = ticket
        self._count(known, flow, ticket, 1)

    def remove(self, ticket: AdmissionTicket) -> None:
        """Remove a waiting request."""
        known, flow = self._place(ticket)
        ticket.waiting = False
        del self._tickets[ticket.request_id]
        self._count(known, flow, ticket, -1)
        _compact(flow.heads[ticket.long], flow.waiting)
        known.sweep()

    def take(self, ticket: AdmissionTicket) -> None:
        """Remove a waiting request that starts, and charge it."""
        known, flow = self._place(ticket)
        known.serve(flow, ticket.cost)
        self.remove(ticket)

    def next(
        self, lanes: tuple[bool, ...] = LANES, *, without: Set[Key] = frozenset()
    ) -> AdmissionTicket | None:
        """Return the next request of the open lanes; it stays queued until it is taken. Flows in `without`
        are skipped, which costs O(tenants); the lookup does not go on to less urgent classes."""
        best: tuple[float, _Class] | None = None
        for known in self._classes.values():
            for lane in lanes:
                oldest = _live(known.oldest[lane])
                if oldest is not None and (best is None or oldest.urgency < best[0]):
                    best = oldest.urgency, known
        if best is None:
            return None
        found = [(lane, flow) for lane in lanes if (flow := best[1].first(lane, without)) is not None]
        lane, flow = min(found, key=lambda each: (each[1].clock, each[0]), default=(False, None))
        return None if flow is None else _live(flow.heads[lane])

    def before(self, ticket: AdmissionTicket, *, own: bool = True) -> float:
        """Return the cost that will start in the lane before a request that is queued now, as far as it is
        known: all more urgent classes, and in its own class what other tenants get until the turn of its
        tenant. Without `own`, the tenant's waiting requests are left out."""
        known, mine = self._place(ticket)
        cost = mine.cost if own else 0
        turn = (max(mine.clock, known.clock) if own else known.clock) + cost / mine.weight
        ahead = float(cost + sum(one.cost for one in self._classes.values() if one.level < known.level))
        for flow in known.flows.values():
            if flow.waiting and flow is not mine:
                ahead += min(flow.cost, max(0.0, turn - flow.clock) * flow.weight)
        return min(ahead, self.costs[ticket.long])

    def backlogs(self) -> dict[Key, tuple[int, float]]:
        """Waiting cost by tenant and class without long prompts, and the same over the promised time to first
        token."""
        flows = (flow for known in self._classes.values() for flow in known.flows.values())
        return {flow.key: (flow.short, flow.pressing) for flow in flows if flow.short}

    def check(self) -> None:
        """Raise AssertionError if the counts do not match the waiting requests."""
        tickets = list(self._tickets.values())
        for lane in LANES:
            here = [ticket for ticket in tickets if ticket.long is lane]
            counted = (self.waiting[lane], self.costs[lane])
            if counted != (len(here), sum(ticket.cost for ticket in here)):
                raise AssertionError(f"lane {lane}: counted {counted}")
        if self.tokens != sum(ticket.prompt_tokens for ticket in tickets):
            raise AssertionError("queued prompt tokens do not match the queue")
        if sum(self._of_tenant.values()) != len(tickets) or not all(t.waiting for t in tickets):
            raise AssertionError("tenants' counts do not match the queue")

    def _place(self, ticket: AdmissionTicket) -> tuple[_Class, _Flow]:
        factor = self._class_factor
        level = 0 if factor else ticket.level
        known = self._classes.get(level)
        if known is None:
            known = self._classes[level] = _Class(level)
        key = key_of(ticket)
        flow = known.flows.get(key)
        if flow is None:
            weight = ticket.weight / factor**ticket.level if factor else ticket.weight
            flow = known.flows[key] = _Flow(key, weight, known.clock)
        return known, flow

    def _count(self, known: _Class, flow: _Flow, ticket: AdmissionTicket, by: int) -> None:
        cost = by * ticket.cost
        self.waiting[ticket.long] += by
        self.costs[ticket.long] += cost
        self.tokens += by * ticket.prompt_tokens
        known.waiting += by
        known.cost += cost
        flow.waiting += by
        flow.cost += cost
        if not ticket.long:
            flow.short += cost
            # Reset at zero, which drops rounding errors.
            flow.pressing = flow.pressing + cost / ticket.ttft_s if flow.short else 0.0
        left = self._of_tenant.get(ticket.tenant, 0) + by
        if left:
            self._of_tenant[ticket.tenant] = left
        else:
            del self._of_tenant[ticket.tenant]
