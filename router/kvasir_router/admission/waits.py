"""How long requests will wait, by what was measured: who is refused for it, and when to come again."""

from __future__ import annotations

import math

from kvasir.core.errors import CapacityError
from kvasir_router.admission.contract import AdmissionRules, AdmissionTicket
from kvasir_router.admission.fair_queue import FairQueue
from kvasir_router.admission.pace import Pace
from kvasir_router.admission.shares import Shares

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0


def bounded(seconds: float) -> float:
    """A time to come again that neither invites a storm nor sends away for good."""
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, seconds))


class Waits:
    """Reads the queue, its paces by lane and the shares that an admission keeps."""

    def __init__(
        self, rules: AdmissionRules, queue: FairQueue, paces: tuple[Pace, Pace], shares: Shares
    ) -> None:
        self._rules = rules
        self._queue = queue
        self._paces = paces
        self._shares = shares

    def refuse_what_is_too_much(self, ticket: AdmissionTicket, waiting: int, now: float) -> None:
        """Raises CapacityError where a queue is full, `waiting` requests being in all."""
        rules, most = self._rules, self._rules.max_tenant_queue
        if most is not None and self._queue.of_tenant(ticket.tenant) >= most:
            raise CapacityError(
                f"{most} requests of yours wait, the most allowed",
                code="tenant_queue_full",
                retry_after_s=self._retry_after_s(ticket, now),
            )
        if waiting >= rules.max_queue:
            raise CapacityError(
                f"{waiting} requests wait, the most allowed",
                code="queue_full",
                retry_after_s=self._retry_after_s(ticket, now),
            )
        if self._queue.tokens + ticket.prompt_tokens > rules.max_queue_tokens and len(self._queue):
            raise CapacityError(
                f"{self._queue.tokens} prompt tokens wait, and {rules.max_queue_tokens} are allowed",
                code="queue_full",
                retry_after_s=self._retry_after_s(ticket, now),
            )

    def refuse_what_comes_too_late(self, ticket: AdmissionTicket, now: float, own_s: float = 0.0) -> None:
        """Raises CapacityError where it would wait for longer than its class or its deadline allows; a long
        prompt may wait for as long as it takes itself, `own_s`."""
        wait_s = self._wait_s(ticket, now)
        service_s = self._paces[ticket.long].service_s
        allowed_s, code = self._allowed_s(ticket, service_s, own_s), "wait_too_long"
        if ticket.deadline_s is not None and ticket.deadline_s - now - service_s < allowed_s:
            allowed_s, code = max(0.0, ticket.deadline_s - now - service_s), "deadline_unreachable"
        elif self._shares.several and self._wait_s(ticket, now, own=False) <= allowed_s:
            code = "tenant_over_share"
        if wait_s > allowed_s:
            raise CapacityError(
                f"the request would wait for about {wait_s:.1f} s, and {allowed_s:.1f} s are allowed",
                code=code,
                retry_after_s=bounded(wait_s - allowed_s),
            )

    def _allowed_s(self, ticket: AdmissionTicket, service_s: float, own_s: float) -> float:
        """How long it may wait for its first token to come in time. Where it could not anyway, a part of that
        time, or `own_s`."""
        promised = self._rules.patience * ticket.ttft_s
        if not promised:
            return math.inf
        return max(promised - service_s, promised / 4, own_s)

    def _wait_s(self, ticket: AdmissionTicket, now: float, *, own: bool = True) -> float:
        """How long it would wait, with or without its tenant's own requests before it; 0 where nothing was
        measured."""
        return self._paces[ticket.long].wait_s(self._queue.before(ticket, own=own), now) or 0.0

    def _retry_after_s(self, ticket: AdmissionTicket, now: float) -> float:
        """When what waits before it will have begun."""
        return bounded(self._wait_s(ticket, now))

    def typical(self, now: float) -> tuple[float, float]:
        """The wait of a tenant's last request, by the measured throughput, in seconds and over what it was
        promised: the mean over the tenants that want something. One that sends too much presses on itself
        most."""
        backlogs, rate = self._queue.backlogs(), self._paces[False].rate(now)
        if not backlogs or not rate:
            return 0.0, 0.0
        weights = self._shares.weights()
        waiting = sum(weights.get(tenant, 1.0) for tenant in {tenant for _, tenant in backlogs})
        part = waiting / max(waiting, sum(weights.values())) / rate
        costs, pressing = zip(*backlogs.values(), strict=True)
        return sum(costs) * part, sum(pressing) * part

    def no_room(self, ticket: AdmissionTicket, waited_s: float, now: float) -> CapacityError:
        """What a request ends with that has waited in the queue for too long."""
        message = f"there was no room for the request within {waited_s:g} s"
        return CapacityError(message, code="queue_timeout", retry_after_s=self._retry_after_s(ticket, now))
