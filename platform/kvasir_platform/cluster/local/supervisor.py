"""Runs one deployment on one machine: starts it in order, watches it, and removes everything at the end.

Every end (a stop signal, a part that died, a failed start) takes the same path: the launcher's orderly stop,
then the janitor's check that nothing is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import KvasirError, StartError
from kvasir.ports.clock import Clock
from kvasir_platform.cluster.local.janitor import Janitor, Leftovers
from kvasir_platform.cluster.local.launcher import Launcher, ReplicaStatus
from kvasir_platform.cluster.local.runtime_dir import DeploymentState, ProcessRecord, RuntimeDir, ShmRecord

T = TypeVar("T")

_DETAIL_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class StartProgress:
    """An event for the user or program that runs `kvasir up`.

    `event` is one of: step (a step began; `text` says what it waits for), detail (its progress), done (the
    step ended), ready, failed, stopping, stopped. `elapsed_s` counts from the start.
    """

    event: str
    step: str = ""
    text: str = ""
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """Timeouts in seconds: `start_s` of the start, after the download of models, `stop_s` of the stop before
    the janitor's."""

    start_s: float
    stop_s: float = 40.0
    poll_s: float = 0.25
    inventory_s: float = 10.0


Probe = Callable[[str], Awaitable[str | None]]
"""Checks whether the gateway at an address can serve: returns None if so, else what is missing. Raises
StartError if it never will."""


class _Stopped(Exception):
    """A stop was requested during the start."""


class Supervisor:
    """Runs one deployment once. `stop` ends it in order; a set `hurry` skips the orderly part. `fetch`
    downloads the model into the local cache if it is missing, so that replicas do not download it in
    parallel; it raises StartError."""

    def __init__(
        self,
        deployment: Deployment,
        launcher: Launcher,
        runtime: RuntimeDir,
        state: DeploymentState,
        *,
        janitor: Janitor,
        probe: Probe,
        clock: Clock,
        wall_time: Callable[[], float],
        report: Callable[[StartProgress], None],
        limits: SupervisorLimits,
        fetch: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._deployment = deployment
        self._launcher = launcher
        self._runtime = runtime
        self._state = state
        self._janitor = janitor
        self._probe = probe
        self._clock = clock
        self._wall_time = wall_time
        self._report = report
        self._limits = limits
        self._fetch = fetch
        self._began = clock.now()
        self._detail = ""
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.stop_reason = "stopped"

    @property
    def state(self) -> DeploymentState:
        """The last written state."""
        return self._state

    async def run(self) -> StartError | None:
        """Run until stopped (returns None; `state.ready_at` says whether it served before) or failed (returns
        why); everything is removed either way, except what a last report of `stopped` names."""
        self._runtime.write(self._state)
        inventory = asyncio.create_task(self._take_inventory(), name="inventory")
        failure: StartError | None = None
        try:
            await self._start()
            failure = await self._or_stopped(self._launcher.wait_failed())
        except _Stopped:
            pass
        except StartError as error:
            failure = error
        except KvasirError as error:
            failure = StartError(error.message)
        finally:
            if failure is not None:
                self._update(failure=failure.message)
                self._say("failed", text=failure.message)
            await self._stop(inventory, failed=failure is not None)
        return failure

    async def _start(self) -> None:
        if self._fetch is not None:
            await self._step("model", "the download to end", self._fetch())
        deadline = self._clock.now() + self._limits.start_s
        await self._step("cluster", "the processes that carry the pools", self._launcher.start_cluster())
        await self._step("pools", "the cluster to take the pools", self._launcher.start_pools())
        address = await self._step("router", "the gateway to listen", self._launcher.start_router())
        self._update(address=address)
        wanted = sum(pool.replicas for pool in self._deployment.pools)
        await self._step("replicas", f"{wanted} to load the model", self._wait_replicas(deadline))
        await self._step("ready", "the router to reach every pool", self._wait_serving(address, deadline))
        self._update(phase="ready", ready_at=self._wall_time())
        self._say("ready", text=address)
        self._update(announced=True)

    async def _step(self, name: str, waits_for: str, work: Awaitable[T]) -> T:
        self._detail = ""
        self._say("step", name, waits_for)
        result = await self._or_stopped(work)
        self._say("done", name)
        return result

    async def _wait_replicas(self, deadline: float) -> None:
        wanted = {pool.name: pool.replicas for pool in self._deployment.pools}
        while True:
            replicas = await self._launcher.pool_status()
            self._update(replicas=tuple(replicas))
            for replica in replicas:
                if replica.state == "failed":
                    raise _failed(replica)
            detail = ", ".join(_pool_line(name, count, replicas) for name, count in wanted.items())
            self._say_detail("replicas", detail)
            ready = [replica.pool for replica in replicas if replica.state == "ready"]
            if all(ready.count(name) >= count for name, count in wanted.items()):
                return
            await self._before(deadline, f"replicas are not ready: {detail}")

    async def _wait_serving(self, address: str, deadline: float) -> None:
        while (missing := await self._probe(address)) is not None:
            self._say_detail("ready", missing)
            await self._before(deadline, f"the gateway at {address} is not ready: {missing}")

    async def _before(self, deadline: float, otherwise: str) -> None:
        if self._clock.now() >= deadline:
            raise StartError(
                f"gave up after {self._limits.start_s:.0f} s: {otherwise}",
                remedy="look at the logs, or allow more time with --timeout",
            )
        await self._clock.sleep(self._limits.poll_s)

    async def _or_stopped(self, work: Awaitable[T]) -> T:
        """Return the result of `work`. Raises _Stopped if a stop comes first, and the error of a part that
        ends by itself meanwhile."""
        main = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self.stop.wait())
        failed = asyncio.ensure_future(self._launcher.wait_failed())
        tasks: set[asyncio.Future[Any]] = {main, stopped, failed}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                raise _Stopped
            if main.done():
                return main.result()
            raise failed.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stop(self, inventory: asyncio.Task[None], *, failed: bool) -> None:
        self._update(phase="stopping")
        self._say("stopping", text=self.stop_reason if not failed else "after the failure")
        # Files that a process has just created can be attributed only until it is stopped.
        await self._end_inventory(inventory)
        await self._inventory()
        inventory = asyncio.create_task(self._take_inventory(), name="inventory")
        stopping = asyncio.ensure_future(self._launcher.stop())
        hurry = asyncio.ensure_future(self.hurry.wait())
        await asyncio.wait(
            {stopping, hurry}, timeout=self._limits.stop_s, return_when=asyncio.FIRST_COMPLETED
        )
        hurry.cancel()
        stopping.cancel()
        result = (await asyncio.gather(stopping, return_exceptions=True))[0]
        if isinstance(result, Exception):
            self._say("detail", "stopping", f"the orderly stop failed: {result!r}")
        await self._end_inventory(inventory)
        await self._inventory()
        left = await asyncio.to_thread(self._sweep)
        self._update(phase="failed" if failed else "stopped", processes=(), shared_memory=(), replicas=())
        self._say("stopped", text="; ".join(left.remaining))

    @staticmethod
    async def _end_inventory(inventory: asyncio.Task[None]) -> None:
        inventory.cancel()
        await asyncio.gather(inventory, return_exceptions=True)

    def _sweep(self) -> Leftovers:
        killed = self._janitor.kill(self._state.processes, at_once=self.hurry.is_set())
        files = self._janitor.remove(self._state.shared_memory, Path(self._state.temp_dir))
        return Leftovers(killed.killed, files.removed, killed.remaining + files.remaining)

    async def _take_inventory(self) -> None:
        """Keep on disk what a clean-up needs, also after a crash of this process. The shared memory of a
        process can be attributed only while it lives, so the state is written as soon as a new name appears.
        """
        names: frozenset[str] = frozenset()
        due = self._clock.now()
        while True:
            seen, now = self._janitor.shm_names(), self._clock.now()
            if seen != names or now >= due:
                await self._inventory()
                steady = self._state.phase == "ready"
                names, due = seen, now + (self._limits.inventory_s if steady else 1.0)
            await self._clock.sleep(0.25 if self._state.phase == "ready" else 0.05)

    async def _inventory(self) -> None:
        processes, files = await asyncio.to_thread(self._look, self._state)
        replicas = tuple(await self._launcher.pool_status())
        self._update(processes=processes, shared_memory=files, replicas=replicas)

    def _look(self, state: DeploymentState) -> tuple[tuple[ProcessRecord, ...], tuple[ShmRecord, ...]]:
        processes = self._janitor.processes(state.processes)
        files = self._janitor.shared_memory(processes) | set(state.shared_memory)
        kept = sorted(filter(self._janitor.holds, files), key=lambda file: file.path)
        return self._janitor.record(processes), tuple(kept)

    def _update(self, **changes: object) -> None:
        changed = msgspec.structs.replace(self._state, **changes)
        if changed != self._state:
            self._state = changed
            self._runtime.write(changed)

    def _say(self, event: str, step: str = "", text: str = "") -> None:
        self._report(StartProgress(event, step, text, self._clock.now() - self._began))

    def _say_detail(self, step: str, text: str) -> None:
        if text != self._detail:
            self._detail = text
            self._say("detail", step, text)


def _failed(replica: ReplicaStatus) -> StartError:
    if replica.is_root:
        return StartError(replica.detail, log=replica.log, remedy=replica.remedy, is_root=True)
    return StartError(
        f"{replica.pool} replica {replica.replica_id} failed: {replica.detail}",
        log=replica.log,
        remedy=replica.remedy or "see the end of its log; `kvasir check` finds common causes",
    )


def _pool_line(name: str, wanted: int, replicas: list[ReplicaStatus]) -> str:
    own = [replica for replica in replicas if replica.pool == name]
    ready = sum(replica.state == "ready" for replica in own)
    details = [" ".join(replica.detail.split()) for replica in own if replica.state != "ready"]
    waiting = next((detail[:_DETAIL_CHARACTERS] for detail in details if detail), "")
    return f"{name} {ready}/{wanted}" + (f" ({waiting})" if waiting else "")


def with_session_token(deployment: Deployment, path: Path) -> Deployment:
    """Return the deployment with `path` as its shared secret, unless it names one itself."""
    if deployment.worker.session_token_file is not None:
        return deployment
    worker = deployment.worker.model_copy(update={"session_token_file": str(path)})
    return deployment.model_copy(update={"worker": worker})
