"""Admission of requests for embeddings: the common rules, without KV, output or long prompts.

A worker computes an input in one pass, so there is no KV to reserve and no output to shorten. A fallback
model does not apply either: the vectors of another model are useless to the client.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from kvasir_router.admission.contract import AdmissionRules, AdmissionTicket
from kvasir_router.admission.fair_admission import FairAdmission
from kvasir_router.admission.waits import no_spare_capacity


class EmbeddingAdmission(FairAdmission):
    """The queue of an embedding machine. Of the brown-out, only steps that shed a priority class apply."""

    def __init__(self, rules: AdmissionRules) -> None:
        sheds = tuple(step for step in rules.brownout.steps if step.shed is not None)
        brownout = replace(rules.brownout, steps=sheds)
        super().__init__(replace(rules, brownout=brownout, long_tokens=sys.maxsize), lambda _: 0)
        self._places = 0

    def wait(self, ticket: AdmissionTicket, now: float, *, served: bool) -> None:
        """Queue an input. Raises CapacityError, without any change, if too much waits, or if the input would
        wait too long; the wait is not checked while no worker serves."""
        if ticket.spare:
            raise no_spare_capacity()
        self.waits.check_queue_limits(ticket, len(self), now)
        if served:
            self.waits.check_wait(ticket, now)
        self._add(ticket, now)

    def next(self) -> AdmissionTicket | None:
        """Return the next input; it stays queued until `begins`."""
        return self._queue.next()

    def resized(self, places: int) -> None:
        """`places` workers serve."""
        if places and self._places and places != self._places:
            self._resized(places / self._places)
        self._places = places or self._places
