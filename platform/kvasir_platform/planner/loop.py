"""Plans and applies pool sizes: from the reports of routers to requests to the scaler.

One thread calls `step` a few times a second; reports arrive on another. Without reports of the load, or a
list of the replicas, no size changes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.demand import DemandReport, PlannerReply, PoolPlan, Traffic
from kvasir.core.errors import ConfigError, UpstreamError
from kvasir.core.requests import Role
from kvasir.ports.scaler import Replica, ReplicaState, Scaler
from kvasir_platform.planner.actions import PoolsSeen, ScalingActions
from kvasir_platform.planner.demand import Demand, Interval
from kvasir_platform.planner.explain import forecast_of, to_dict
from kvasir_platform.planner.models import ScaledModel, is_scaled, scaled_model
from kvasir_platform.planner.planner import PoolState
from kvasir_platform.planner.starts import Starts
from kvasir_platform.planner.victims import Savings

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 30.0


class ScalingLoop:
    """The planner's loop of one deployment. `epoch` identifies this run of the planner, and routers' reports
    have to name it; `tell` takes an event's name and its details. `rolling(pool)`: its replicas are being
    replaced, and their number must not change. `pins` are sizes that users requested earlier; `before` is the
    loop for an earlier spec of the same deployment, whose learned load is kept."""

    def __init__(
        self,
        deployment: Deployment,
        scaler: Scaler,
        *,
        epoch: str,
        tell: Callable[..., None],
        rolling: Callable[[str], bool] = lambda _pool: False,
        pins: Mapping[str, int] | None = None,
        before: ScalingLoop | None = None,
    ) -> None:
        self._spec = deployment.scaling
        self._scaler = scaler
        self._epoch = epoch
        self._tell = tell
        self._lock = threading.Lock()
        self._demand = Demand(self._spec.stale_s)
        self._savings = Savings()
        self._starts = Starts(self._spec.start_s)
        self._pins = dict(pins or {})
        self._actions = ScalingActions(
            self._spec, scaler, pins=self._pins, savings=self._savings, rolling=rolling, tell=tell
        )
        self._due_s: float | None = None
        self._read_s: float | None = None
        self._frozen: str | None = "no router has reported yet"
        self._unseen = True
        self._began = False
        self._adopted: dict[str, tuple[str, str, Role]] = {}
        self._word = PlannerReply(epoch, True, {}, {}, {})
        known = {} if before is None else {name: each.planner for name, each in before._models.items()}
        self._models: dict[str, ScaledModel] = {
            view.model.name: scaled_model(view, known.get(view.model.name))
            for view in deployment.views()
            if is_scaled(view)
        }
        self._planned = {
            pool.name: pool.scaling
            for model in self._models.values()
            for pool in model.view.pools
            if pool.scaling is not None
        }

    # -- called on the reports' thread -----------------------------------------------------------

    def take(self, report: DemandReport, now: float) -> PlannerReply:
        """Take a router's report, and return the reply. Thread-safe."""
        with self._lock:
            accepted = report.epoch == self._epoch and self._demand.take(report, now)
            if accepted and not self._began:
                # A planner that has just started keeps the roles that its predecessor assigned.
                self._adopted |= self._lent(report)
            word = self._word
            roles = word.roles | {worker: role for worker, (_, _, role) in self._adopted.items()}
        return PlannerReply(word.epoch, accepted, roles, word.ready_in_s, word.pools)

    def _lent(self, report: DemandReport) -> dict[str, tuple[str, str, Role]]:
        """Return the workers that do another pool's work, for routers: model, that pool and its role."""
        found = {}
        for name, model in self._models.items():
            roles = {pool.name: pool.role for pool in model.view.pools}
            for worker in report.workers:
                partner = model.view.partner(worker.pool) if worker.pool in roles else None
                if partner is not None and worker.role is roles[partner]:
                    found[worker.worker_id] = (name, partner, worker.role)
        return found

    # -- called by the control process -----------------------------------------------------------

    def pin(self, pool: str, size: int | None) -> None:
        """Keep a pool at a size, whatever the plan; None ends that. Raises ConfigError for a pool without
        scaling, and for a size outside its bounds."""
        bounds = self._planned.get(pool)
        if bounds is None:
            raise ConfigError(f"{pool} has no scaling in the deployment spec; set its `replicas` instead")
        if size is None:
            self._pins.pop(pool, None)
        elif 0 <= size <= bounds.max:
            self._pins[pool] = size
        else:
            raise ConfigError(f"{pool} can have 0 to {bounds.max} replicas (scaling.max), not {size}")
        self._due_s = None

    def plans(self, pool: str) -> bool:
        """Whether the planner decides the pool's number of replicas."""
        return pool in self._planned

    @property
    def pins(self) -> Mapping[str, int]:
        """Return the pinned pools."""
        return self._pins

    def step(self, now: float) -> bool:
        """Run what is due. Return whether any replica is starting or leaving."""
        due = self._due_s is None or now >= self._due_s
        if not due and not self._waking(now):
            return False
        try:
            replicas = self._scaler.observe()
            self._starts.look(replicas, now)
            # Read after that listing, which takes time, so that reports meanwhile wake their models too.
            if waking := self._waking(now):
                for name in waking:
                    self._actions.wake(self._models[name], replicas, now)
                replicas = self._scaler.observe()
            if due:
                self._decide(replicas, now)
                self._due_s = now + self._spec.interval_s
                # Routers learn at once that a model was put to sleep: until then they are not ready
                # without a worker, and a request for the model waits for the next decision.
                replicas = self._scaler.observe()
        except UpstreamError as error:
            why = f"replicas cannot be listed: {error.message}"
        except ConfigError as error:
            # An error of the planner must not stop serving.
            why = f"the scaler rejected a size: {error.message}"
        else:
            self._publish(replicas, now)
            return any(each.state is not ReplicaState.SERVING for each in replicas)
        self._freeze(why)
        self._due_s = now + self._spec.interval_s
        return True

    def explain(self, now: float) -> dict[str, object]:
        """Return everything that `kvasir explain scaling` shows."""
        return {
            "mode": self._spec.mode,
            "frozen": self._frozen,
            "pins": dict(self._pins),
            "pools": [
                to_dict(decision, self._word.pools.get(decision.pool))
                for model in self._models.values()
                for decision in model.decisions.values()
            ],
            "acts": self._actions.to_dicts(now),
        }

    # -- decisions -------------------------------------------------------------------------------

    def _decide(self, replicas: Sequence[Replica], now: float) -> None:
        with self._lock:
            missing = self._demand.missing(now)
            if missing is None and not self._demand.reported:
                return
            intervals = self._demand.read(now)
            workers = self._demand.workers()
        seconds = 0.0 if self._read_s is None else now - self._read_s
        self._read_s = now
        # Load that arrived while reports were missing would count as if it had arrived in this interval.
        unseen, self._unseen = self._unseen, missing is not None
        self._freeze(missing)
        if missing is not None or unseen or seconds <= 0.0:
            return
        with self._lock:
            self._began = True
            adopted, self._adopted = self._adopted, {}
        for worker, (name, pool, _) in adopted.items():
            self._models[name].flipped[worker] = pool
        self._savings.take(workers.values(), seconds)
        for name, model in self._models.items():
            interval = intervals.get(name, Interval(seconds, Traffic()))
            own = {pool.name for pool in model.view.pools}
            model.forget_flips(replicas)
            figures = [
                replace(each, pool=model.flipped.get(each.worker_id, each.pool))
                for each in workers.values()
                if each.pool in own
            ]
            states = {pool.name: self._state(model, pool, replicas, now) for pool in model.view.pools}
            decisions = model.planner.plan(interval, states, figures, now)
            model.decisions = {each.pool: each for each in decisions}
            self._actions.carry_out(model, decisions, states, PoolsSeen(replicas, workers, now))

    def _state(
        self, model: ScaledModel, pool: PoolSpec, replicas: Sequence[Replica], now: float
    ) -> PoolState:
        own = [each for each in replicas if model.serves(each) == pool.name]
        starting = [each for each in own if each.state is ReplicaState.STARTING]
        late = sum(now - each.since_s > self._spec.start_timeout_s for each in starting)
        return PoolState(
            serving=sum(each.state is ReplicaState.SERVING for each in own),
            starting=len(starting),
            start_s=self._starts.typical_s(pool.name, [each.name for each in model.view.pools]),
            stuck=late,
            pinned=self._pins.get(pool.name),
        )

    def _waking(self, now: float) -> list[str]:
        """Return the sleeping models that have requests."""
        with self._lock:
            asking = self._demand.asking()
        return [name for name, count in asking.items() if count and self._asleep(name, now)]

    def _asleep(self, name: str, now: float) -> bool:
        model = self._models.get(name)
        if model is None or not model.asleep:
            return False
        # A requested replica that does not appear after a while is requested again.
        return model.asked_s is None or now - model.asked_s > _ASK_AGAIN_S

    def _roles(self) -> dict[str, Role]:
        return {worker: role for model in self._models.values() for worker, role in model.roles().items()}

    def _publish(self, replicas: Sequence[Replica], now: float) -> None:
        """Set the reply to routers."""
        pools: dict[str, PoolPlan] = {}
        awake: dict[str, float] = {}
        for name, model in self._models.items():
            states = {pool.name: self._state(model, pool, replicas, now) for pool in model.view.pools}
            for pool, state in states.items():
                decision = model.decisions.get(pool)
                desired = state.have if decision is None else decision.size
                acts, seen = self._actions.acts_now(pool), None if decision is None else forecast_of(decision)
                pools[pool] = PoolPlan(desired, state.serving, state.starting, acts, seen)
            lacking = [pool for pool, state in states.items() if state.serving == 0]
            model.asleep = bool(lacking) and all(model.view.scales_to_zero(pool) for pool in model.view.pools)
            # A model whose start nobody requested is not reported as waking.
            if model.asleep and all(
                states[pool].starting or self._actions.may_start(pool) for pool in lacking
            ):
                awake[name] = max(self._awake_in_s(pool, states[pool], replicas, now) for pool in lacking)
            if not any(state.have == 0 for state in states.values()):
                model.asked_s = None
        with self._lock:
            self._word = PlannerReply(self._epoch, True, self._roles(), awake, pools)

    def _awake_in_s(self, pool: str, state: PoolState, replicas: Sequence[Replica], now: float) -> float:
        starting = [e.since_s for e in replicas if e.pool == pool and e.state is ReplicaState.STARTING]
        since = now - min(starting) if starting else 0.0
        # A start that takes longer than usual may end at any time.
        return state.start_s - since if since < state.start_s else 0.2 * state.start_s

    def _freeze(self, why: str | None) -> None:
        if why != self._frozen and (why is None or self._frozen is None):
            if why is None:
                log.info("pool sizes are planned")
            else:
                log.warning("pool sizes are unchanged: %s", why)
            self._tell("scaling", frozen=why)
        self._frozen = why
