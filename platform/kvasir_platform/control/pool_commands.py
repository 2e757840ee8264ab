"""What the control process does on request: restart a pool's replicas, or change their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvasir.core.errors import ConfigError
from kvasir.ports.clock import Clock
from kvasir_platform.control.commands import Ask, Caller
from kvasir_platform.control.rolling import ReplicaRow, Rolling

# For one replica to load its model; its predecessor's drain comes on top.
START_S = 300.0
_MESSAGE_CHARACTERS = 2000


class Status(Protocol):
    """What is needed of kvasir_platform.control.ray_pools.PoolStatus."""

    @property
    def pool(self) -> str: ...

    @property
    def failed(self) -> bool: ...

    @property
    def message(self) -> str: ...


class Pools(Protocol):
    """What is needed of kvasir_platform.control.ray_pools.RayPools."""

    def wanted(self, pool: str) -> int: ...

    def replicas(self, pool: str) -> list[ReplicaRow]: ...

    def restart(self, pool: str) -> bool: ...

    def settle(self, pool: str) -> bool: ...

    def scale(self, pool: str, replicas: int) -> None: ...


class PoolCommands:
    """Takes commands one at a time; `step` follows the one that runs."""

    def __init__(self, pools: Pools, clock: Clock, *, drain_s: float) -> None:
        self._pools = pools
        self._clock = clock
        self._drain_s = drain_s
        self._running: tuple[Rolling, Caller] | None = None

    @property
    def busy(self) -> bool:
        """Whether a command runs."""
        return self._running is not None

    def take(self, asked: Ask, caller: Caller) -> None:
        """Begin what is asked for, or refuse it with the reason."""
        try:
            if self._running is not None:
                busy = self._running[0].pool
                raise ConfigError(f"{busy} is being restarted; ask again when that is done")
            if asked.command == "restart":
                self._restart(asked.pool, caller)
            elif asked.command == "scale" and asked.replicas is not None:
                self._pools.scale(asked.pool, asked.replicas)
                caller.tell("done", pool=asked.pool, replicas=asked.replicas)
            else:
                raise ConfigError(
                    f"unknown command {asked.command!r}; there are: restart, scale (with replicas)"
                )
        except ConfigError as error:
            caller.tell("refused", message=error.message)

    def step(self, statuses: Sequence[Status]) -> None:
        """Look how far the running command is, and tell who asked."""
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

    def _restart(self, pool: str, caller: Caller) -> None:
        wanted = self._pools.wanted(pool)
        old = frozenset(row.replica_id for row in self._pools.replicas(pool))
        beside = self._pools.restart(pool)
        deadline = self._clock.now() + max(1, wanted) * (START_S + self._drain_s)
        self._running = (Rolling(pool, old, wanted, deadline), caller)
        caller.tell("started", pool=pool, replicas=wanted, beside=beside)
