"""The models whose pools the planner sizes, and which replicas do whose work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.requests import Role
from kvasir.ports.scaler import Replica, ReplicaState
from kvasir_platform.planner.capacity import SloTarget
from kvasir_platform.planner.planner import Decision, ModelRules, Planner, PoolRules
from kvasir_platform.planner.sizes import Bounds

_AIM = 0.25
"""Planned share of the allowed SLO misses: the plan itself is missed now and then."""


@dataclass(slots=True)
class ScaledModel:
    """A model with at least one scaled pool. `asked_s` is when a replica was last requested for a request
    that waits, None if none is expected; `asleep`: it has no worker, and none is needed. `flipped` has the
    pool whose work a worker does, if it is not its own."""

    view: Deployment
    planner: Planner
    asked_s: float | None = None
    asleep: bool = False
    flipped: dict[str, str] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)

    def serves(self, replica: Replica) -> str:
        """Return the pool whose work a replica does."""
        return self.flipped.get(replica.worker_id, replica.pool)

    def roles(self) -> dict[str, Role]:
        """Return the roles of workers that do another pool's work."""
        return {worker: self.view.pool(pool).role for worker, pool in self.flipped.items()}

    def forget_flips(self, replicas: Sequence[Replica]) -> None:
        """Forget workers that no longer serve."""
        there = {each.worker_id for each in replicas if each.state is ReplicaState.SERVING}
        gone = [worker for worker in self.flipped if worker not in there]
        for worker in gone:
            del self.flipped[worker]


def is_scaled(view: Deployment) -> bool:
    """Whether any pool of a model has scaling."""
    return any(pool.scaling is not None for pool in view.pools)


def room(pool: PoolSpec, replicas: Sequence[Replica]) -> int:
    """Return how many more replicas a pool may have: leaving ones hold their pods until they are gone, and
    those that do another pool's work hold theirs."""
    return pool.most - sum(each.pool == pool.name for each in replicas)


def scaled_model(view: Deployment, known: Planner | None) -> ScaledModel:
    """Return the model of `view`, with `known` as its planner if that can follow its rules."""
    spec = view.scaling
    rules = ModelRules(
        pools=tuple(
            PoolRules(
                Bounds(
                    pool.name,
                    pool.role,
                    pool.replicas if pool.scaling is None else pool.scaling.min,
                    pool.most,
                ),
                pool.engine.largest_batch,
            )
            for pool in view.pools
        ),
        promise=SloTarget(min(each.ttft_s for each in view.slo), min(each.itl_s for each in view.slo)),
        aim=_AIM * (1.0 - spec.attainment),
        interval_s=spec.interval_s,
        window_s=spec.window_s,
        idle_s=spec.idle_s,
    )
    return ScaledModel(view, known if known is not None and known.follow(rules) else Planner(rules))
