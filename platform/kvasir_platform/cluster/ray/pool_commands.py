"""Commands to the control process: restart a pool's replicas, change their number, or tell about pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvasir.core.errors import ConfigError
from kvasir.ports.clock import Clock
from kvasir_platform.cluster.local.commands import CommandClient, ControlCommand
from kvasir_platform.cluster.ray.pool_records import PoolRecord
from kvasir_platform.cluster.ray.pool_status import RUNNING, ReplicaRow, Rolling

_MESSAGE_CHARACTERS = 2000


class RestartablePoolStatus(Protocol):
    """The part of kvasir_platform.cluster.ray.pool_status.PoolStatus that is needed."""

    @property
    def pool(self) -> str: ...

    @property
    def failed(self) -> bool: ...

    @property
    def message(self) -> str: ...


class ShownPoolStatus(RestartablePoolStatus, Protocol):
    """The same, for `status`."""

    @property
    def state(self) -> str: ...

    @property
    def wanted(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def remedy(self) -> str: ...


class FailedAttempt(Protocol):
    """The part of kvasir_platform.cluster.ray.pool_rolls.FailedStart that is needed."""

    @property
    def note(self) -> str: ...


class RestartablePools(Protocol):
    """The part of kvasir_platform.cluster.ray.pools.RayPools that is needed."""

    def names(self) -> Sequence[str]: ...

    def record(self, pool: str) -> PoolRecord: ...

    def wanted(self, pool: str) -> int: ...

    def replicas(self, pool: str) -> list[ReplicaRow]: ...

    def restart(self, pool: str) -> bool: ...

    def settle(self, pool: str) -> bool: ...

    def scale(self, pool: str, replicas: int) -> None: ...

    def pin(self, pool: str, replicas: int | None) -> None: ...

    def status(self) -> Sequence[ShownPoolStatus]: ...


def _never(_pool: str) -> None:
    return None


class Sizes(Protocol):
    """The part of the planner that is needed."""

    def pin(self, pool: str, size: int | None) -> None: ...

    def plans(self, pool: str) -> bool: ...

    def explain(self, now: float) -> dict[str, object]: ...


class PoolCommands:
    """Runs one command at a time; `step` advances the running one. `failed_start` returns the newest start of
    a pool that failed, if it has not started since. A restart has `start_s` seconds for each replica to load
    its model, and `drain_s` for the drain of its predecessor."""

    def __init__(
        self,
        pools: RestartablePools,
        clock: Clock,
        *,
        start_s: float,
        drain_s: float,
        sizes: Sizes | None = None,
        failed_start: Callable[[str], FailedAttempt | None] = _never,
    ) -> None:
        self._pools = pools
        self._failed_start = failed_start
        self._sizes = sizes
        self._clock = clock
        self._replica_s = start_s + drain_s
        self._running: tuple[Rolling, CommandClient] | None = None

    @property
    def busy(self) -> bool:
        """Whether a command is running."""
        return self._running is not None

    def take(self, asked: ControlCommand, caller: CommandClient) -> None:
        """Start the requested command, or refuse it with the reason."""
        try:
            if asked.command == "explain":
                self._explain(caller)
                return
            if asked.command == "status":
                caller.tell("done", pools=[self._shown(status) for status in self._pools.status()])
                return
            if self._running is not None:
                busy = self._running[0].pool
                raise ConfigError(f"{busy} is being restarted; retry when that is done")
            if asked.command == "restart":
                self._restart(asked.pool, caller)
            elif asked.command == "scale" and asked.replicas is not None:
                self._scale(asked.pool, asked.replicas)
                caller.tell("done", pool=asked.pool, replicas=asked.replicas)
            elif asked.command == "unpin":
                self._unpin(asked.pool)
                caller.tell("done", pool=asked.pool, replicas=None)
            else:
                raise ConfigError(
                    f"unknown command {asked.command!r}; there are: restart, scale (with replicas), unpin, "
                    "explain, status"
                )
        except ConfigError as error:
            caller.tell("refused", message=error.message)

    def _scale(self, pool: str, replicas: int) -> None:
        """Pin a planned pool at the size; of any other pool, only request the size."""
        self._pools.wanted(pool)
        if self._sizes is None or not self._sizes.plans(pool):
            self._pools.scale(pool, replicas)
            return
        self._sizes.pin(pool, replicas)
        self._pools.pin(pool, replicas)

    def _unpin(self, pool: str) -> None:
        self._pools.wanted(pool)
        if self._sizes is None:
            raise ConfigError(f"no planner sizes {pool}: give it a number, as in {pool}=2")
        self._sizes.pin(pool, None)
        self._pools.pin(pool, None)

    def _shown(self, status: ShownPoolStatus) -> dict[str, object]:
        failed = self._failed_start(status.pool)
        why = (status.message, status.remedy) if failed is None else (failed.note,)
        return {
            "pool": status.pool,
            "state": status.state,
            "wanted": status.wanted,
            "running": status.running,
            "detail": "; ".join(each for each in why if each),
        }

    def _explain(self, caller: CommandClient) -> None:
        """Explain the planner's sizes, and those of pools without one: `by_hand`."""
        sizes = self._sizes
        planned: dict[str, object] = {} if sizes is None else sizes.explain(self._clock.now())
        others = [name for name in self._pools.names() if sizes is None or not sizes.plans(name)]
        caller.tell("done", explanation=planned | {"by_hand": [self._by_hand(name) for name in others]})

    def _by_hand(self, pool: str) -> dict[str, object]:
        record = self._pools.record(pool)
        own = f"pools.{pool}.replicas"
        serving = sum(row.state == RUNNING for row in self._pools.replicas(pool))
        why = f"the spec's size ({own})"
        if record.wanted != record.spec_replicas:
            why = f"set by `kvasir scale`, until {own} changes, which is {record.spec_replicas}"
        return {"pool": pool, "serving": serving, "size": record.wanted, "why": why}

    def step(self, statuses: Sequence[RestartablePoolStatus]) -> None:
        """Report the progress of the running command to its caller."""
        if self._running is None:
            return
        rolling, caller = self._running
        failure = next(
            (s.message or "no reason given" for s in statuses if s.pool == rolling.pool and s.failed), ""
        )
        outcome = rolling.step(self._pools.replicas(rolling.pool), failure=failure, now=self._clock.now())
        progress = {"pool": rolling.pool, "replaced": rolling.replaced, "wanted": rolling.wanted}
        if outcome == "progress":
            caller.tell("progress", **progress)
        elif outcome == "done":
            caller.tell("done", **progress)
        elif outcome == "failed":
            self._pools.settle(rolling.pool)
            message = failure[-_MESSAGE_CHARACTERS:] or "not done in time"
            caller.tell("failed", message=message, **progress)
        if outcome in ("done", "failed"):
            self._running = None

    def _restart(self, pool: str, caller: CommandClient) -> None:
        wanted = self._pools.wanted(pool)
        old = frozenset(row.replica_id for row in self._pools.replicas(pool))
        beside = self._pools.restart(pool)
        deadline = self._clock.now() + max(1, wanted) * self._replica_s
        self._running = (Rolling(pool, old, wanted, deadline), caller)
        caller.tell("started", pool=pool, replicas=wanted, beside=beside)
