"""What routers tell about the load, in figures that only grow, so that a report that is lost loses
nothing."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from kvasir.core.requests import Role


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests of one model at one router. All but the last four count since the router started.

    `arrived` are all that came, those that were refused for want of room too, with `arrived_tokens` of
    prompt. Of those that ended well: `prompt_tokens`, `computed_tokens` (the part of the prompts that was in
    no cache) and the sum of its squares, `output_tokens`. `judged` had a service level that the fleet could
    keep or break, and `met` of them got it. `waiting` requests with `waiting_tokens` of prompt have not
    begun, `parked` of them because no worker serves their model; `in_flight` counts all that have not ended.
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
        """Both together."""
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    def since(self, before: Traffic) -> Traffic:
        """What has come since `before`; what does not count is as it is. What has become less was counted
        anew."""
        return replace(
            self, **{name: max(0, getattr(self, name) - getattr(before, name)) for name in _COUNTED}
        )


_NAMES = tuple(each.name for each in fields(Traffic))
_COUNTED = _NAMES[:-4]


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker as a router sees it: `role` is the part of the work that it is given, `serving` whether it
    is given any. Seconds as the router has learned them: computing `n` prompt tokens takes `prefill_fixed_s +
    n * prefill_token_s`, a step with `n` streams `step_fixed_s + n * step_stream_s`. `hit_tokens` counts the
    prompt tokens that its cache has saved, `kv_tokens` is the room of its cache, `used_tokens` what requests
    hold of it. `streams` are all that run there, of all routers."""

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
    """What one router tells. `sequence` grows with each report of the process that calls itself `router_id`;
    `epoch` is that of the planner which it is told to, "" while it is not known."""

    router_id: str
    epoch: str
    sequence: int
    models: dict[str, Traffic]
    workers: tuple[WorkerStats, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool as the planner sees it. `desired` replicas are what it plans for, `applied` whether it also
    changes the pool, `serving` and `starting` what there is."""

    desired: int
    serving: int
    starting: int
    applied: bool


@dataclass(frozen=True, slots=True)
class PlannerReply:
    """What the planner answers a router. `roles` are those of workers that do another part of the work than
    their pool's. Of each model in `ready_in_s` no worker serves, or not in every role that it takes: it may
    be had in so many seconds. `accepted` is whether the report was."""

    epoch: str
    accepted: bool
    roles: dict[str, Role]
    ready_in_s: dict[str, float]
    pools: dict[str, PoolPlan]
