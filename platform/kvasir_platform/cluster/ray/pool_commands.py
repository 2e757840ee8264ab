"""Commands to the control process: restart a pool's replicas, or change their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvasir.core.errors import ConfigError
from kvasir.ports.clock import Clock
from kvasir_platform.cluster.local.commands import CommandClient, ControlCommand
from kvasir_platform.cluster.ray.pool_status import ReplicaRow, Rolling

# Time for one replica to load its model; the drain of its predecessor is added.
START_S = 300.0
_MESSAGE_CHARACTERS = 2000


class RestartablePoolStatus(Protocol):
    """The part of kvasir_platform.cluster.ray.pool_status.PoolStatus that is needed."""

    @property
    def pool(self) -> str: ...

    @property
    def failed(self) -> bool: ...

    @property
    def message(self) -> str: ...


class RestartablePools(Protocol):
    """The part of kvasir_platform.cluster.ray.pools.RayPools that is needed."""

    def wanted(self, pool: str) -> int: ...

    def replicas(self, pool: str) -> list[ReplicaRow]: ...

    def restart(self, pool: str) -> bool: ...

    def settle(self, pool: str) -> bool: ...

    def scale(self, pool: str, replicas: int) -> None: ...

    def pin(self, pool: str, replicas: int | None) -> None: ...


class Sizes(Protocol):
    """The part of the planner that is needed."""

    def pin(self, pool: str, size: int | None) -> None: ...

    def plans(self, pool: str) -> bool: ...

    def explain(self, now: float) -> dict[str, object]: ...


class PoolCommands:
    """Runs one command at a time; `step` advances the running one."""

    def __init__(
        self, pools: RestartablePools, clock: Clock, *, drain_s: float, sizes: Sizes | None = None
    ) -> None:
        self._pools = pools
        self._sizes = sizes
        self._clock = clock
        self._drain_s = drain_s
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
                    "explain"
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

    def _explain(self, caller: CommandClient) -> None:
        if self._sizes is None:
            raise ConfigError(
                "no pool is sized by the planner: give pools a `scaling` with min and max, and leave "
                "scaling.mode at auto or advise"
            )
        caller.tell("done", explanation=self._sizes.explain(self._clock.now()))

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
        deadline = self._clock.now() + max(1, wanted) * (START_S + self._drain_s)
        self._running = (Rolling(pool, old, wanted, deadline), caller)
        caller.tell("started", pool=pool, replicas=wanted, beside=beside)
