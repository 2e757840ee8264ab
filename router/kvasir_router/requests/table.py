"""The table of a machine's requests, which all parts of the machine share.

A part is given this table and the parts that it calls, in the order legs, completion, placement, failover,
progress; none is called back by one that comes after it.
"""

from __future__ import annotations

from kvasir_router.admission import Admission, AdmissionRules
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.requests.events import Effect
from kvasir_router.requests.restarts import RetryAccounting
from kvasir_router.requests.state import MachineLimits, RequestState
from kvasir_router.requests.timers import Timers


class RequestTable:
    """Requests that have not ended, by their ids, and what is counted, waits and is to be done for them.
    `out` has the effects of the event that is handled; `retries` counts requests that run again."""

    def __init__(self, fleet: Fleet, limits: MachineLimits, rules: AdmissionRules) -> None:
        self.fleet = fleet
        self.limits = limits
        self.states: dict[str, RequestState] = {}
        self.admission = Admission(fleet, rules)
        self.timers = Timers()
        self.retries = RetryAccounting(
            max_retries=limits.max_retries,
            max_migrations=limits.max_migrations,
            budget_ratio=limits.retry_budget,
        )
        self.out: list[Effect] = []

    def wait_until(self, state: RequestState, now: float) -> None:
        """A request waits for a worker, for as long as it may."""
        state.queued_until = now + self.limits.queue_timeout_s
        self.timers.set(state.queued_until, state.request.request_id)
