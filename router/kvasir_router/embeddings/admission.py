"""Which input is embedded next, which are refused, and what is done under pressure.

The rules are those of requests that generate (see kvasir_router.admission), as far as there is anything to
decide: tenants by their weights, priority classes, refusals of what would come too late, and classes that
are shed. An input holds no KV, and a worker is done with it in one pass, so that there is no room to keep
and nothing to cut short; and another model's vectors are of no use to who asked for this one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvasir.core.invariants import require
from kvasir.core.requests import Request
from kvasir.ports.router import AdmissionView
from kvasir_router.admission.contract import AdmissionRules, AdmissionTicket
from kvasir_router.admission.fair_queue import FairQueue
from kvasir_router.admission.pace import Pace
from kvasir_router.admission.shares import Shares
from kvasir_router.admission.waits import Waits
from kvasir_router.admission.watch import Watch


class EmbeddingAdmission:
    """The queue of a machine that embeds. Obligations as of Admission: who waits begins, unless it ends
    before, once its turn has come, and what `begins` takes, `ended` gives back."""

    def __init__(self, rules: AdmissionRules) -> None:
        sheds = tuple(step for step in rules.brownout.steps if step.shed is not None)
        self._rules = rules = replace(rules, brownout=replace(rules.brownout, steps=sheds))
        self._queue = FairQueue(class_factor=rules.class_factor)
        self._pace = Pace()
        self._shares = Shares(self._queue.of_tenant)
        paces = (self._pace, Pace())
        self.waits = Waits(rules, self._queue, paces, self._shares)
        self.watch = Watch(rules, self._queue, paces, self.waits)
        self._places = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[str]:
        return iter(self._queue)

    def ticket(self, request: Request, now: float) -> AdmissionTicket:
        """What admission knows of an input that arrives. Raises CapacityError (shed)."""
        rules, tenant, tokens = self._rules, request.tenant, len(request.tokens)
        level = rules.level(request.priority)
        self.watch.refuse_what_is_shed(level)
        weight = rules.weights.get(tenant, 1.0)
        self._shares.seen(*rules.holder(level, tenant), weight, now)
        return AdmissionTicket(
            request_id=request.request_id,
            tenant=tenant,
            weight=weight,
            level=level,
            urgency=rules.urgency(request.priority, now),
            cost=tokens,
            prompt_tokens=tokens,
            kv_least=0,
            choices=1,
            whole=True,
            itl_s=request.slo.itl_s,
            ttft_s=request.slo.ttft_s,
            deadline_s=request.deadline_s,
        )

    def wait(self, ticket: AdmissionTicket, now: float, *, served: bool) -> None:
        """Let an input wait. Raises CapacityError, without any change, where too much waits, or for too long;
        how long is not asked where no worker serves it at all."""
        self.waits.refuse_what_is_too_much(ticket, len(self._queue), now)
        if served:
            self.waits.refuse_what_comes_too_late(ticket, now)
        self._queue.add(ticket)
        self._pace.waited(now)
        self.watch.waited()

    def next(self) -> AdmissionTicket | None:
        """Whose turn it is; it goes on waiting until `begins`."""
        return self._queue.next()

    def begins(self, ticket: AdmissionTicket, now: float) -> None:
        """The input is sent to a worker for the first time."""
        if ticket.waiting:
            self._queue.take(ticket)
            self._pace.began(ticket.cost, now)
        else:
            self._queue.charge(ticket)
        ticket.holds = True
        self._shares.hold(*self._rules.holder(ticket.level, ticket.tenant), ticket.cost)

    def embedded(self, seconds: float) -> None:
        """A vector came so long after its input was sent."""
        self._pace.first_token(seconds)

    def ended(self, ticket: AdmissionTicket) -> None:
        """The input is over, wherever it was."""
        if ticket.waiting:
            self._queue.remove(ticket)
        if ticket.holds:
            ticket.holds = False
            self._shares.release(*self._rules.holder(ticket.level, ticket.tenant), ticket.cost)

    def resized(self, places: int) -> None:
        """So many workers serve."""
        if places and self._places and places != self._places:
            self._pace.resized(places / self._places)
        self._places = places or self._places

    def view(self, now: float) -> AdmissionView:
        """For metrics and the edge."""
        wait_s, pressure = self.waits.typical(now)
        return AdmissionView(
            queued=len(self._queue),
            wait_s=wait_s,
            tokens_per_s=self._pace.rate(now) or 0.0,
            pressure=pressure,
            brownout=self.watch.brownout.view,
        )

    def check(self, holding: int) -> None:
        """Raises AssertionError unless it agrees with itself, and with how many inputs have begun."""
        self._queue.check()
        require(self._queue.tenants() <= self._shares.weights().keys(), "waits, and is not reckoned with")
        require(self._shares.running == holding, f"{self._shares.running} held, {holding} begun")
