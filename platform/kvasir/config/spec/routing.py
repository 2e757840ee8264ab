"""The part of the deployment spec for routers: policy, index, queue, health and SLO classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from kvasir.config.spec.base import Name, Spec
from kvasir.core.requests import SloClass

PolicyName = Literal[
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
]


class HealthSpec(Spec):
    """When a worker that fails or is slow is ejected for some time."""

    consecutive_failures: int = Field(default=5, ge=1)
    """Number of consecutive failed requests after which a worker is ejected."""
    slow_ratio: float = Field(default=8.0, gt=1)
    """A worker is ejected if its TTFT exceeds the predicted TTFT by this factor and that of its peers does
    not."""
    ejection_s: float = Field(default=2.0, gt=0)
    """Duration of the first ejection. It doubles with each further one."""
    max_ejection_s: float = Field(default=60.0, gt=0)
    """Maximum duration of an ejection."""
    max_ejected: float = Field(default=0.5, ge=0, le=1)
    """If more than this fraction of a pool would be ejected, its failing workers get requests too, once the
    healthy ones have no room (panic mode)."""
    slow_start_s: float = Field(default=10.0, ge=0)
    """Time over which the share of a worker that joins or returns rises to its full value. 0: at once."""
    max_legs: int = Field(default=4096, ge=1)
    """Maximum requests of one router on one worker at a time. A worker at the limit is skipped."""


class RoutingSpec(Spec):
    """Routing policy, prefix index and queue of the router."""

    policy: PolicyName = "cost"
    """`cost` weighs prefix hits, queues, transfers and batch sizes in seconds. The others are classic
    policies and the published formulas of other routers, mainly for comparison."""
    index_blocks: int = Field(default=10_000_000, ge=1024, le=100_000_000)
    """Maximum blocks in the prefix index, counted once per worker and tier; at most 48 bytes of memory each.
    Routing to a worker that does not fit uses predictions."""
    predicted_blocks: int = Field(default=1_000_000, ge=1024, le=100_000_000)
    """Maximum predicted blocks among them. Beyond it, the oldest are evicted."""
    predicted_ttl_s: float = Field(default=300.0, gt=0)
    """How long a predicted block remains in the index of a worker that does not report its blocks."""
    decision_records: int = Field(default=4096, ge=0, le=1_000_000)
    """Number of recent decisions kept for `kvasir explain`."""
    queue_timeout_s: float = Field(default=60.0, gt=0)
    """Maximum time in the queue for a worker; then the answer is 503."""
    max_queue: int = Field(default=1024, ge=1)
    """Maximum requests in the queue for a worker. Further ones are answered with 503."""
    max_in_flight: int = Field(default=4096, ge=1)
    """Maximum requests in flight. Further ones are answered with 503."""
    max_retries: int = Field(default=2, ge=0, le=10)
    """Maximum retries on another worker for a request that has not emitted a token."""
    max_migrations: int = Field(default=3, ge=0, le=10)
    """Maximum failovers of a request after the loss of its worker."""
    cross_role_after_s: float | None = Field(default=0.5, ge=0)
    """How long no worker of a role must serve before requests run whole on any worker of the model that can.
    null: they wait for a worker of that role."""
    retry_budget: float = Field(default=0.15, ge=0, le=1)
    """Maximum retries after a failure or without an answer, as a fraction of arriving requests. Failovers
    after the loss of a worker do not count."""
    hedge_after: float = Field(default=8.0, ge=0)
    """A request without output after this multiple of its predicted TTFT is cancelled and retried on another
    worker, once. 0: never."""
    hedge_min_s: float = Field(default=1.0, ge=0)
    """Minimum time before a request is cancelled and retried."""
    health: HealthSpec = HealthSpec()


class SloSpec(Spec):
    """An SLO class that requests can name. The first one is the default."""

    name: Name
    ttft_s: float = Field(default=2.0, gt=0)
    """Time to first token."""
    itl_s: float = Field(default=0.1, gt=0)
    """Inter-token latency."""


def strictest(classes: Sequence[SloSpec]) -> SloClass:
    """Return what any class promises, so that what is slow for its class is not taken for quick."""
    return SloClass("any", min(each.ttft_s for each in classes), min(each.itl_s for each in classes))


class PerformanceSpec(Spec):
    """What is known of the speed of engines before requests have shown it."""

    profile: str | None = None
    """Path of a profile that `kvasir calibrate` wrote, where routers run. It replaces the figures of data
    sheets for workers with its hardware and its model. Read once, when a router starts."""
