"""The admission rules that generation and embedding share: who waits, who is refused, who is shed.

Subclasses add the limits of their workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvasir.core.invariants import require
from kvasir.core.requests import Request
from kvasir.ports.router import AdmissionView
from kvasir_router.admission.contract import AdmissionRules, AdmissionTicket
from kvasir_router.admission.fair_queue import FairQueue, Key
from kvasir_router.admission.pace import Pace
from kvasir_router.admission.shares import Shares
from kvasir_router.admission.waits import Waits, no_spare_capacity
from kvasir_router.admission.watch import Watch
from kvasir_router.fleet.work import runs_whole


class FairAdmission:
    """A fair queue with limits on waits, shares of tenants, and a brown-out under pressure.

    `output_tokens` returns the expected output of a request, over all its choices. Each request that `begins`
    is counted in its tenant's share until `ended`."""

    def __init__(self, rules: AdmissionRules, output_tokens: Callable[[Request], int]) -> None:
        self._rules = rules
        self._output_tokens = output_tokens
        self._queue = FairQueue(class_factor=rules.class_factor)
        self._shares = Shares(self._queue.of_tenant)
        self._paces = (Pace(), Pace())
        self.waits = Waits(rules, self._queue, self._paces, self._shares)
        self._watch = Watch(rules, self._queue, self._paces, self.waits)
        self.brownout = self._watch.brownout
        self._spare = 0
        """Number of running requests that run in spare capacity."""

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[str]:
        return iter(self._queue)

    # -- arrivals --------------------------------------------------------------------------------

    def reduced(self, request: Request) -> Request:
        """Return the request with the limits of the current brown-out. Raises CapacityError (shed)."""
        if not self.brownout.level:
            return request
        level = self._rules.level(request.priority)
        if self._is_spare(level):
            # Its output would be shortened, though it could wait.
            raise no_spare_capacity()
        self._watch.check_not_shed(level)
        sampling, cap = request.sampling, self.brownout.cap
        if cap is None or (sampling.max_tokens is not None and sampling.max_tokens <= cap):
            return request
        return replace(request, sampling=replace(sampling, max_tokens=max(cap, sampling.min_tokens)))

    def ticket(self, request: Request, now: float) -> AdmissionTicket:
        """Return the ticket of a request that arrives."""
        rules, sampling, tenant = self._rules, request.sampling, request.tenant
        prompt, output = len(request.tokens), self._output_tokens(request)
        weight, level = rules.weights.get(tenant, 1.0), rules.level(request.priority)
        spare = self._is_spare(level)
        if not spare:
            self._shares.seen(*rules.holder(level, tenant), weight, now)
        return AdmissionTicket(
            request_id=request.request_id,
            tenant=tenant,
            weight=weight,
            level=level,
            urgency=rules.urgency(request.priority, now),
            cost=prompt + output,
            prompt_tokens=prompt,
            kv_least=output,
            choices=sampling.n,
            whole=runs_whole(sampling),
            itl_s=request.slo.itl_s,
            ttft_s=request.slo.ttft_s,
            deadline_s=request.deadline_s,
            # The lane of long prompts is for those that wait.
            long=prompt >= rules.long_tokens and not spare,
            spare=spare,
        )

    def _is_spare(self, level: int) -> bool:
        """Whether requests of a class run only in capacity that others leave."""
        return self._rules.spare_level is not None and level >= self._rules.spare_level

    def _add(self, ticket: AdmissionTicket, now: float) -> None:
        # The request may have been parked for longer than its tenant is remembered.
        self._shares.seen(*self._holder(ticket), ticket.weight, now)
        self._queue.add(ticket)
        self._paces[ticket.long].waited(now)
        self._watch.waited()

    # -- what begins and ends --------------------------------------------------------------------

    def begins(self, ticket: AdmissionTicket, now: float) -> None:
        """The request is sent to workers, for the first time or again."""
        if ticket.spare:
            self._spare += not ticket.holds
            ticket.holds = True
            return
        if ticket.waiting:
            self._queue.take(ticket)
            self._paces[ticket.long].began(ticket.cost, now)
        elif not ticket.holds:
            self._queue.charge(ticket)
        if not ticket.holds:
            ticket.holds = True
            self._shares.hold(*self._holder(ticket), ticket.cost)

    def first_token(self, ticket: AdmissionTicket, seconds: float | None) -> None:
        """The first result came `seconds` after the request began; None if that is not typical."""
        if seconds is not None and not ticket.spare:
            self._paces[ticket.long].first_token(seconds)

    def ended(self, ticket: AdmissionTicket) -> None:
        """The request ended, queued or running."""
        if ticket.waiting:
            self._queue.remove(ticket)
        if ticket.spare:
            self._spare -= ticket.holds
            ticket.holds = False
        elif ticket.holds:
            ticket.holds = False
            self._shares.release(*self._holder(ticket), ticket.cost)

    # -- time ------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Measure the queue and update the brown-out; called after every event."""
        if not self._watch.idle:
            self._watch.look(now)

    def next_due(self) -> float | None:
        """The time at which `tick` may change something without an event."""
        return None if self._watch.idle else self._watch.next_due()

    def view(self, now: float) -> AdmissionView:
        """Return the state for metrics and edges."""
        wait_s, pressure = self.waits.typical(now)
        return AdmissionView(
            queued=len(self._queue),
            wait_s=wait_s,
            tokens_per_s=self._paces[False].rate(now) or 0.0,
            pressure=pressure,
            brownout=self.brownout.view,
        )

    def check(self, holding: int) -> None:
        """Raise AssertionError if the counts disagree, or if not `holding` requests have begun."""
        self._queue.check()
        require(self._queue.tenants() <= self._shares.weights().keys(), "a queued tenant without a share")
        held = self._shares.running + self._spare
        require(held == holding, f"{held} held, {holding} begun")

    def _resized(self, factor: float) -> None:
        for pace in self._paces:
            pace.resized(factor)

    def _holder(self, ticket: AdmissionTicket) -> Key:
        return self._rules.holder(ticket.level, ticket.tenant)
