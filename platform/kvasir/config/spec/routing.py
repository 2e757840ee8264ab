"""The deployment spec's part about the router: policy, index, queue, health and service levels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvasir.config.spec.base import Name, Spec


class HealthSpec(Spec):
    """When a worker that answers badly is left alone for a while."""

    consecutive_failures: int = Field(default=5, ge=1)
    """So many failed requests in a row eject a worker."""
    slow_ratio: float = Field(default=8.0, gt=1)
    """A worker whose times to first token are so many times those predicted, while its peers' are not, is
    ejected."""
    ejection_s: float = Field(default=2.0, gt=0)
    """The first ejection lasts so long; each following one twice as long as the one before."""
    max_ejection_s: float = Field(default=60.0, gt=0)
    """The longest ejection."""
    max_ejected: float = Field(default=0.5, ge=0, le=1)
    """When more than this fraction of a pool looks bad, the signal is not believed, and all of the pool is
    used (panic mode)."""
    slow_start_s: float = Field(default=10.0, ge=0)
    """How long a worker that joins or comes back takes to get its full share. 0: at once."""
    max_legs: int = Field(default=4096, ge=1)
    """Requests that one router runs on one worker at once; beyond it the worker is passed over."""


class RoutingSpec(Spec):
    """The router's policy, index and queue."""

    policy: Literal[
        "cost",
        "round_robin",
        "least_loaded",
        "power_of_two",
        "session",
        "consistent_hash",
        "prefix",
        "dynamo",
        "llm_d",
        "sglang",
        "mooncake",
        "production_stack",
    ] = "cost"
    """`cost` weighs prefix hits, queues, transfers and batch sizes in seconds. The others are for
    comparison and for those who want them: classics, and the published formulas of other routers."""
    index_blocks: int = Field(default=10_000_000, ge=1024, le=100_000_000)
    """Blocks the prefix index holds at most, counted once for each worker and tier that holds them; at
    most 48 bytes of memory each. A worker that does not fit in is routed to by prediction."""
    predicted_blocks: int = Field(default=1_000_000, ge=1024, le=100_000_000)
    """How many of them may be predictions; beyond it the oldest are forgotten."""
    predicted_ttl_s: float = Field(default=300.0, gt=0)
    """How long the router believes that a worker still holds what it was sent, if the worker does not
    report what it holds."""
    decision_records: int = Field(default=4096, ge=0, le=1_000_000)
    """Decisions kept for `kvasir explain`, the newest ones."""
    queue_timeout_s: float = Field(default=60.0, gt=0)
    """How long a request waits for a worker before 503."""
    max_queue: int = Field(default=1024, ge=1)
    """Requests that may wait for a worker; more are answered 503."""
    max_in_flight: int = Field(default=4096, ge=1)
    """Requests in the system at once; more are answered 503."""
    max_retries: int = Field(default=2, ge=0, le=10)
    """How often a request that has not emitted a token is started again elsewhere."""
    max_migrations: int = Field(default=3, ge=0, le=10)
    """How often a request goes on elsewhere after its worker was lost."""
    retry_budget: float = Field(default=0.15, ge=0, le=1)
    """Starts after a failure or for want of an answer, as a fraction of the requests that arrive; those after
    the loss of a worker do not count."""
    hedge_after: float = Field(default=8.0, ge=0)
    """A request of which nothing has come after so many times its predicted time to first token is taken back
    and started on another worker, once. 0 never does."""
    hedge_min_s: float = Field(default=1.0, ge=0)
    """No request is taken back sooner than this."""
    health: HealthSpec = HealthSpec()


class SloSpec(Spec):
    """A service level that requests can ask for by name; the first one is the default."""

    name: Name
    ttft_s: float = Field(default=2.0, gt=0)
    """Time to first token."""
    itl_s: float = Field(default=0.1, gt=0)
    """Time between two tokens."""
