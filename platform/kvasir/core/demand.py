"""Load reports of routers to the planner. Counters only grow, so a lost report loses no data."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from kvasir.core.requests import Role


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of one model at one router. All fields but the last four count since the router started.

    `arrived` includes requests refused for lack of capacity, with `arrived_tokens` of prompt. Of requests
    that succeeded: `prompt_tokens`, `computed_tokens` (the uncached part of the prompts) and the sum of its
    squares, `output_tokens`. `judged` requests could meet or miss their SLO class, and `met` of them met it.
    `waiting` requests with `waiting_tokens` of prompt have not started, `parked` of them because no worker
    serves their model. `in_flight` counts all that have not ended.
    """

    arrived: int = 0
    arrived_tokens: int = 0
    ended: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    computed_squares: int = 0
    output_tokens: int = 0
    judged: int = 0
    met: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    parked: int = 0
    in_flight: int = 0

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum of both."""
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    def since(self, before: Traffic) -> Traffic:
        """Return the counters relative to `before`, and the other fields unchanged. A counter that has
        decreased was reset and yields 0."""
        return replace(
            self, **{name: max(0, getattr(self, name) - getattr(before, name)) for name in _COUNTED}
        )


_NAMES = tuple(each.name for each in fields(Traffic))
_COUNTED = _NAMES[:-4]


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker as seen by a router. `role` is its current role, `serving` whether it receives requests. The
    router measures times: `n` prompt tokens take `prefill_fixed_s + n * prefill_token_s` seconds, a step with
    `n` streams `step_fixed_s + n * step_stream_s`. `hit_tokens` counts prompt tokens found in its cache,
    `kv_tokens` is the capacity of its cache, of which requests hold `used_tokens`. `streams` counts the
    running streams of all routers."""

    worker_id: str
    pool: str
    role: Role
    serving: bool
    prefill_fixed_s: float
    prefill_token_s: float
    step_fixed_s: float
    step_stream_s: float
    hit_tokens: int
    kv_tokens: int
    used_tokens: int
    streams: int


@dataclass(frozen=True, slots=True)
class DemandReport:
    """The report of one router. `sequence` grows with each report of the process `router_id`. `epoch` is that
    of the receiving planner, "" while it is unknown."""

    router_id: str
    epoch: str
    sequence: int
    models: dict[str, Traffic]
    workers: tuple[WorkerStats, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolForecast:
    """Why a pool has its desired size. `load` is the present load, `expected` the forecast for when a new
    replica would serve, `upper` the forecast with its margin, all in busy replicas; `because` are the rules
    that decided, in order."""

    load: float
    expected: float
    upper: float
    because: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool as seen by the planner: the `desired` replicas, whether that size is `applied`, and the
    replicas that are `serving` and `starting`. Without a decision there is no `forecast`."""

    desired: int
    serving: int
    starting: int
    applied: bool
    forecast: PoolForecast | None = None


@dataclass(frozen=True, slots=True)
class PlannerReply:
    """The planner's reply to a router. `roles` has the roles of workers that differ from that of their pool.
    `ready_in_s` has the expected seconds until each model that lacks workers in some role can be served.
    `accepted`: whether the report was accepted."""

    epoch: str
    accepted: bool
    roles: dict[str, Role]
    ready_in_s: dict[str, float]
    pools: dict[str, PoolPlan]
