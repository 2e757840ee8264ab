"""What the planner does with its decisions: starts, retirements, flips of roles and wake-ups."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvasir.config.spec.scaling import ScalingSpec
from kvasir.core.demand import WorkerStats
from kvasir.ports.scaler import Replica, ReplicaState, Scaler
from kvasir_platform.planner.explain import sentence
from kvasir_platform.planner.models import ScaledModel, room
from kvasir_platform.planner.planner import Decision, PoolState
from kvasir_platform.planner.sizes import whole
from kvasir_platform.planner.victims import Savings, Size, flips, victims

_MOST_ACTS = 256


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


@dataclass(frozen=True, slots=True)
class PoolsSeen:
    """What the planner sees at `now`: the scaler's replicas, and the latest figures of routers by worker."""

    replicas: Sequence[Replica]
    workers: Mapping[str, WorkerStats]
    now: float

    def of(self, model: ScaledModel, pool: str) -> list[Replica]:
        """Return the replicas that do a pool's work."""
        return [each for each in self.replicas if model.serves(each) == pool]


class ScalingActions:
    """Carries out decisions through the scaler, unless the mode is to advise only. `pins` are the sizes that
    users requested, `rolling(pool)` whether its replicas are being replaced, `tell` takes an event's name and
    its details."""

    def __init__(
        self,
        spec: ScalingSpec,
        scaler: Scaler,
        *,
        pins: Mapping[str, int],
        savings: Savings,
        rolling: Callable[[str], bool],
        tell: Callable[..., None],
    ) -> None:
        self._spec = spec
        self._scaler = scaler
        self._pins = pins
        self._savings = savings
        self._rolling = rolling
        self._tell = tell
        self._acts: deque[ScalingAction] = deque(maxlen=_MOST_ACTS)

    def acts_now(self, pool: str) -> bool:
        """Whether decisions for the pool are carried out."""
        return self._spec.mode == "auto" or pool in self._pins

    def may_start(self, pool: str) -> bool:
        """Whether replicas of the pool are started."""
        return self.acts_now(pool) and self._pins.get(pool) != 0

    def to_dicts(self, now: float) -> list[dict[str, object]]:
        """Return the latest actions, oldest first, for `kvasir explain scaling`."""
        return [
            {"ago_s": now - act.at_s, "pool": act.pool, "what": act.what, "count": act.count}
            | {"why": act.why, "done": act.done}
            for act in self._acts
        ]

    def carry_out(
        self,
        model: ScaledModel,
        decisions: Sequence[Decision],
        states: Mapping[str, PoolState],
        seen: PoolsSeen,
    ) -> None:
        """Bring a model's pools to their decided sizes: by roles that change first, then by starts and
        retirements."""
        left = self._after_flips(model, decisions, states, seen)
        for each in decisions:
            change = left.get(each.pool, 0)
            why = sentence(each)
            if change > 0:
                free = room(model.view.pool(each.pool), seen.replicas)
                if free > 0:
                    self._start(each.pool, min(change, free), why, seen.now)
            elif change < 0:
                self._retire(model, each.pool, -change, why, seen)

    def wake(self, model: ScaledModel, replicas: Sequence[Replica], now: float) -> None:
        """Start a replica for a request of a model that no worker serves."""
        asleep = [
            pool
            for pool in model.view.pools
            if pool.scaling is not None
            and self._pins.get(pool.name) != 0
            and not any(e.pool == pool.name and e.state is not ReplicaState.LEAVING for e in replicas)
        ]
        for pool in asleep:
            if room(pool, replicas) > 0:
                why = "a request waits, and its model has no worker"
                self._note(ScalingAction(now, pool.name, "wake", 1, why, self.acts_now(pool.name)))
                if self.acts_now(pool.name):
                    self._scaler.start(pool.name, 1)
        # Leaving replicas may occupy all resources: retry at the next step.
        if all(room(pool, replicas) > 0 for pool in asleep):
            model.asked_s = now

    def _after_flips(
        self,
        model: ScaledModel,
        decisions: Sequence[Decision],
        states: Mapping[str, PoolState],
        seen: PoolsSeen,
    ) -> dict[str, int]:
        """Lend replicas between pools, and return how many each pool still lacks, or has too many (< 0)."""
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
            self._flip(model, source, target, count, seen)
        return left

    def _start(self, pool: str, count: int, why: str, now: float) -> None:
        if self.acts_now(pool):
            self._scaler.start(pool, count)
        self._note(ScalingAction(now, pool, "start", count, why, self.acts_now(pool)))

    def _retire(self, model: ScaledModel, pool: str, count: int, why: str, seen: PoolsSeen) -> None:
        late_s = seen.now - self._spec.start_timeout_s
        going = victims(seen.of(model, pool), count, self._savings, seen.workers, late_s)
        if not going:
            return
        if self.acts_now(pool):
            for home in {each.pool for each in going}:
                self._scaler.retire(home, [each.replica_id for each in going if each.pool == home])
        self._note(ScalingAction(seen.now, pool, "retire", len(going), why, self.acts_now(pool)))

    def _flip(self, model: ScaledModel, source: str, target: str, count: int, seen: PoolsSeen) -> None:
        own = seen.of(model, source)
        serving = [each for each in own if each.state is ReplicaState.SERVING and each.worker_id]
        # Replicas that return to their own pool first; then those whose caches save least.
        home = [each for each in serving if each.pool == target]
        others = victims([e for e in serving if e not in home], count, self._savings, seen.workers)
        chosen = (home + others)[:count]
        applied = self.acts_now(source) and self.acts_now(target)
        why = f"{target} grows, and {source} has surplus replicas"
        self._note(ScalingAction(seen.now, target, "flip", len(chosen), why, applied))
        if applied:
            for each in chosen:
                if each.pool == target:
                    model.flipped.pop(each.worker_id, None)
                else:
                    model.flipped[each.worker_id] = target

    def _note(self, act: ScalingAction) -> None:
        last = next((each for each in reversed(self._acts) if each.pool == act.pool), None)
        # Advice that is not followed stays the same at every step.
        if not act.done and last is not None and (last.what, last.count) == (act.what, act.count):
            return
        self._acts.append(act)
        self._tell("scaling", pool=act.pool, what=act.what, count=act.count, why=act.why, done=act.done)
