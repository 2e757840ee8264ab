"""Plans and applies pool sizes: from the reports of routers to requests to the scaler.

One thread calls `step` a few times a second; reports arrive on another. Without reports of the load, or a
list of the replicas, no size changes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.demand import DemandReport, PlannerReply, PoolPlan, Traffic
from kvasir.core.errors import ConfigError, UpstreamError
from kvasir.core.requests import Role
from kvasir.ports.scaler import Replica, ReplicaState, Scaler
from kvasir_platform.planner.capacity import SloTarget
from kvasir_platform.planner.demand import Demand, Interval
from kvasir_platform.planner.explain import forecast_of, sentence, to_dict
from kvasir_platform.planner.planner import Decision, ModelRules, Planner, PoolRules, PoolState
from kvasir_platform.planner.sizes import Bounds, whole
from kvasir_platform.planner.starts import Starts
from kvasir_platform.planner.victims import Savings, Size, flips, victims

log = logging.getLogger(__name__)

_AIM = 0.25
"""Planned share of the allowed SLO misses: the plan itself is missed now and then."""
_MOST_ACTS = 256
_ASK_AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class ScalingAction:
    """An action, or one that would have been taken (`done` False), at `at_s` of the clock. `what` is start,
    retire, flip or wake."""

    at_s: float
    pool: str
    what: str
    count: int
    why: str
    done: bool


@dataclass(slots=True)
class _Model:
    view: Deployment
    planner: Planner
    asked_s: float | None = None
    asleep: bool = False
    flipped: dict[str, str] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)


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
        self._rolling = rolling
        self._lock = threading.Lock()
        self._demand = Demand(self._spec.stale_s)
        self._savings = Savings()
        self._starts = Starts(self._spec.start_s)
        self._pins = dict(pins or {})
        self._acts: deque[ScalingAction] = deque(maxlen=_MOST_ACTS)
        self._due_s: float | None = None
        self._read_s: float | None = None
        self._frozen: str | None = "no router has reported yet"
        self._unseen = True
        self._began = False
        self._adopted: dict[str, tuple[str, str, Role]] = {}
        self._word = PlannerReply(epoch, True, {}, {}, {})
        known = {} if before is None else {name: each.planner for name, each in before._models.items()}
        self._models: dict[str, _Model] = {
            view.model.name: _model(view, known.get(view.model.name))
            for view in deployment.views()
            if _scaled(view)
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
                    self._wake(name, replicas, now)
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
            "acts": [
                {"ago_s": now - act.at_s, "pool": act.pool, "what": act.what, "count": act.count}
                | {"why": act.why, "done": act.done}
                for act in self._acts
            ],
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
            self._forget_flips(model, replicas)
            figures = [
                replace(each, pool=model.flipped.get(each.worker_id, each.pool))
                for each in workers.values()
                if each.pool in own
            ]
            states = {pool.name: self._state(model, pool, replicas, now) for pool in model.view.pools}
            decisions = model.planner.plan(interval, states, figures, now)
            model.decisions = {each.pool: each for each in decisions}
            self._carry_out(model, decisions, states, replicas, now)

    def _state(self, model: _Model, pool: PoolSpec, replicas: Sequence[Replica], now: float) -> PoolState:
        own = [each for each in replicas if _serves(each, model) == pool.name]
        starting = [each for each in own if each.state is ReplicaState.STARTING]
        late = sum(now - each.since_s > self._spec.start_timeout_s for each in starting)
        return PoolState(
            serving=sum(each.state is ReplicaState.SERVING for each in own),
            starting=len(starting),
            start_s=self._starts.typical_s(pool.name, [each.name for each in model.view.pools]),
            stuck=late,
            pinned=self._pins.get(pool.name),
        )

    def _carry_out(
        self,
        model: _Model,
        decisions: Sequence[Decision],
        states: Mapping[str, PoolState],
        replicas: Sequence[Replica],
        now: float,
    ) -> None:
        least = {pool.name: pool.scaling.min for pool in model.view.pools if pool.scaling is not None}
        left = {
            each.pool: each.size - each.have
            for each in decisions
            if each.pool in least and not self._rolling(each.pool)
        }
        sizes = [
            Size(
                pool=each.pool,
                serving=states[each.pool].serving,
                have=each.have,
                desired=each.size,
                need=max(1, least[each.pool], whole(each.need)),
            )
            for each in decisions
            if each.pool in left and states[each.pool].pinned is None
        ]
        partners = {
            pool.name: partner
            for pool in model.view.pools
            if (partner := model.view.partner(pool.name)) is not None
        }
        for source, target, count in flips(sizes, partners):
            left[source] = min(0, left[source] + count)
            left[target] -= count
            own = [e for e in replicas if _serves(e, model) == source]
            self._flip(model, own, (source, target), count, now)
        for each in decisions:
            change = left.get(each.pool, 0)
            why = sentence(each)
            if change > 0:
                room = _room(model.view.pool(each.pool), replicas)
                if room > 0:
                    self._start(each.pool, min(change, room), why, now)
            elif change < 0:
                own = [e for e in replicas if _serves(e, model) == each.pool]
                self._retire(own, each.pool, -change, why, now)

    def _acts_now(self, pool: str) -> bool:
        return self._spec.mode == "auto" or pool in self._pins

    def _may_start(self, pool: str) -> bool:
        return self._acts_now(pool) and self._pins.get(pool) != 0

    def _start(self, pool: str, count: int, why: str, now: float) -> None:
        if self._acts_now(pool):
            self._scaler.start(pool, count)
        self._note(ScalingAction(now, pool, "start", count, why, self._acts_now(pool)))

    def _retire(self, own: Sequence[Replica], pool: str, count: int, why: str, now: float) -> None:
        with self._lock:
            workers = self._demand.workers()
        going = victims(own, count, self._savings, workers, now - self._spec.start_timeout_s)
        if not going:
            return
        if self._acts_now(pool):
            for home in {each.pool for each in going}:
                self._scaler.retire(home, [each.replica_id for each in going if each.pool == home])
        self._note(ScalingAction(now, pool, "retire", len(going), why, self._acts_now(pool)))

    def _flip(
        self, model: _Model, own: Sequence[Replica], between: tuple[str, str], count: int, now: float
    ) -> None:
        source, target = between
        serving = [each for each in own if each.state is ReplicaState.SERVING and each.worker_id]
        # Replicas that return to their own pool first; then those whose caches save least.
        with self._lock:
            workers = self._demand.workers()
        home = [each for each in serving if each.pool == target]
        chosen = (home + victims([e for e in serving if e not in home], count, self._savings, workers))[
            :count
        ]
        applied = self._acts_now(source) and self._acts_now(target)
        why = f"{target} grows, and {source} has surplus replicas"
        self._note(ScalingAction(now, target, "flip", len(chosen), why, applied))
        if applied:
            for each in chosen:
                if each.pool == target:
                    model.flipped.pop(each.worker_id, None)
                else:
                    model.flipped[each.worker_id] = target

    def _wake(self, name: str, replicas: Sequence[Replica], now: float) -> None:
        """Start a replica for a request of a model that no worker serves."""
        model = self._models[name]
        asleep = [
            pool
            for pool in model.view.pools
            if pool.scaling is not None
            and self._pins.get(pool.name) != 0
            and not any(e.pool == pool.name and e.state is not ReplicaState.LEAVING for e in replicas)
        ]
        for pool in asleep:
            if _room(pool, replicas) > 0:
                why = "a request waits, and its model has no worker"
                self._note(ScalingAction(now, pool.name, "wake", 1, why, self._acts_now(pool.name)))
                if self._acts_now(pool.name):
                    self._scaler.start(pool.name, 1)
        # Leaving replicas may occupy all resources: retry at the next step.
        if all(_room(pool, replicas) > 0 for pool in asleep):
            model.asked_s = now

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

    def _forget_flips(self, model: _Model, replicas: Sequence[Replica]) -> None:
        there = {each.worker_id for each in replicas if each.state is ReplicaState.SERVING}
        gone = [worker for worker in model.flipped if worker not in there]
        for worker in gone:
            del model.flipped[worker]

    def _roles(self) -> dict[str, Role]:
        return {
            worker: model.view.pool(pool).role
            for model in self._models.values()
            for worker, pool in model.flipped.items()
        }

    def _publish(self, replicas: Sequence[Replica], now: float) -> None:
        """Set the reply to routers."""
        pools: dict[str, PoolPlan] = {}
        awake: dict[str, float] = {}
        for name, model in self._models.items():
            states = {pool.name: self._state(model, pool, replicas, now) for pool in model.view.pools}
            for pool, state in states.items():
                decision = model.decisions.get(pool)
                desired = state.have if decision is None else decision.size
                acts, seen = self._acts_now(pool), None if decision is None else forecast_of(decision)
                pools[pool] = PoolPlan(desired, state.serving, state.starting, acts, seen)
            lacking = [pool for pool, state in states.items() if state.serving == 0]
            model.asleep = bool(lacking) and all(model.view.scales_to_zero(pool) for pool in model.view.pools)
            # A model whose start nobody requested is not reported as waking.
            if model.asleep and all(states[pool].starting or self._may_start(pool) for pool in lacking):
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

    def _note(self, act: ScalingAction) -> None:
        last = next((each for each in reversed(self._acts) if each.pool == act.pool), None)
        # Advice that is not followed stays the same at every step.
        if not act.done and last is not None and (last.what, last.count) == (act.what, act.count):
            return
        self._acts.append(act)
        self._tell("scaling", pool=act.pool, what=act.what, count=act.count, why=act.why, done=act.done)


def _scaled(view: Deployment) -> bool:
    return any(pool.scaling is not None for pool in view.pools)


def _room(pool: PoolSpec, replicas: Sequence[Replica]) -> int:
    """Return how many more replicas a pool may have: leaving ones hold their pods until they are gone, and
    those that do another pool's work hold theirs."""
    return pool.most - sum(each.pool == pool.name for each in replicas)


def _serves(replica: Replica, model: _Model) -> str:
    """Return the pool whose work a replica does."""
    return model.flipped.get(replica.worker_id, replica.pool)


def _model(view: Deployment, known: Planner | None) -> _Model:
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
                pool.engine.max_num_seqs * pool.engine.data_parallel_size,
            )
            for pool in view.pools
        ),
        promise=SloTarget(min(each.ttft_s for each in view.slo), min(each.itl_s for each in view.slo)),
        aim=_AIM * (1.0 - spec.attainment),
        interval_s=spec.interval_s,
        window_s=spec.window_s,
        idle_s=spec.idle_s,
    )
    return _Model(view, known if known is not None and known.follow(rules) else Planner(rules))
