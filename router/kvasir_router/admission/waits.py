"""Estimated waits from measured throughput: whom they refuse, and what `Retry-After` says."""

from __future__ import annotations

import math

from kvasir.core.errors import CapacityError
from kvasir_router.admission.contract import AdmissionRules, AdmissionTicket
from kvasir_router.admission.fair_queue import FairQueue
from kvasir_router.admission.pace import Pace
from kvasir_router.admission.shares import Shares

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0


def bounded(seconds: float) -> float:
    """Return the time within bounds that neither cause a retry storm nor turn clients away for good."""
    return min(MOST_RETRY_S, max(LEAST_RETRY_S, seconds))


def no_spare_capacity() -> CapacityError:
    """Return the error of a request that may not wait: one that did would be part of what others wait for,
    and of the throughput by which their waits are judged."""
    return CapacityError(
        "other requests leave no capacity for it", code="no_spare_capacity", retry_after_s=LEAST_RETRY_S
    )


class Waits:
    """Estimates waits from the queue, its paces by lane and the shares of an admission."""

    def __init__(
        self, rules: AdmissionRules, queue: FairQueue, paces: tuple[Pace, Pace], shares: Shares
    ) -> None:
        self._rules = rules
        self._queue = queue
        self._paces = paces
        self._shares = shares

    def check_queue_limits(self, ticket: AdmissionTicket, waiting: int, now: float) -> None:
        """Raise CapacityError if a queue is full; `waiting` is the number of all waiting requests."""
        rules, most = self._rules, self._rules.max_tenant_queue
        if most is not None and self._queue.of_tenant(ticket.tenant) >= most:
            raise CapacityError(
                f"your tenant has {most} waiting requests, which is its limit",
                code="tenant_queue_full",
                retry_after_s=self._retry_after_s(ticket, now),
            )
        if waiting >= rules.max_queue:
            raise CapacityError(
                f"{waiting} requests wait, which is the limit",
                code="queue_full",
                retry_after_s=self._retry_after_s(ticket, now),
            )
        if self._queue.tokens + ticket.prompt_tokens > rules.max_queue_tokens and len(self._queue):
            raise CapacityError(
                f"{self._queue.tokens} prompt tokens wait, and the limit is {rules.max_queue_tokens}",
                code="queue_full",
                retry_after_s=self._retry_after_s(ticket, now),
            )

    def check_wait(self, ticket: AdmissionTicket, now: float, own_s: float = 0.0) -> None:
        """Raise CapacityError if the wait exceeds what the request's class or deadline allows. A long prompt
        may wait for as long as its own prefill takes, `own_s`."""
        wait_s = self._wait_s(ticket, now)
        service_s = self._paces[ticket.long].service_s
        allowed_s, code = self._allowed_s(ticket, service_s, own_s), "wait_too_long"
        if ticket.deadline_s is not None and ticket.deadline_s - now - service_s < allowed_s:
            allowed_s, code = max(0.0, ticket.deadline_s - now - service_s), "deadline_unreachable"
        elif self._shares.several and self._wait_s(ticket, now, own=False) <= allowed_s:
            code = "tenant_over_share"
        if wait_s > allowed_s:
            raise CapacityError(
                f"the request would wait for about {wait_s:.1f} s, and the limit is {allowed_s:.1f} s",
                code=code,
                retry_after_s=bounded(wait_s - allowed_s),
            )

    def _allowed_s(self, ticket: AdmissionTicket, service_s: float, own_s: float) -> float:
        """Return the longest wait with which the first token comes in time. If none does, a quarter of the
        promised time, or `own_s`."""
        promised = self._rules.patience * ticket.ttft_s
        if not promised:
            return math.inf
        return max(promised - service_s, promised / 4, own_s)

    def _wait_s(self, ticket: AdmissionTicket, now: float, *, own: bool = True) -> float:
        """Return the estimated wait, with or without the waiting requests of the same tenant; 0 if no rate is
        known."""
        return self._paces[ticket.long].wait_s(self._queue.before(ticket, own=own), now) or 0.0

    def _retry_after_s(self, ticket: AdmissionTicket, now: float) -> float:
        """Return the time until the requests before it have started."""
        return bounded(self._wait_s(ticket, now))

    def typical(self, now: float) -> tuple[float, float]:
        """Return the wait of a tenant's last request by the measured throughput, in seconds and divided by
        the promised time to first token, as a mean over the active tenants. A tenant that sends too much
        raises its own part most."""
        backlogs, rate = self._queue.backlogs(), self._paces[False].rate(now)
        if not backlogs or not rate:
            return 0.0, 0.0
        weights = self._shares.weights()
        waiting = sum(weights.get(tenant, 1.0) for tenant in {tenant for _, tenant in backlogs})
        part = waiting / max(waiting, sum(weights.values())) / rate
        costs, pressing = zip(*backlogs.values(), strict=True)
        return sum(costs) * part, sum(pressing) * part

    def no_room(self, ticket: AdmissionTicket, waited_s: float, now: float) -> CapacityError:
        """Return the error of a request that waited in the queue for too long."""
        message = f"there was no room for the request within {waited_s:g} s"
        return CapacityError(message, code="queue_timeout", retry_after_s=self._retry_after_s(ticket, now))
