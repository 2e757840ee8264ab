"""One data-parallel rank of the simulated engine: its scheduler, stepped by a clock, and its pulls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvasir.config.spec.deployment import SimSpec
from kvasir.core.errors import TransferError
from kvasir.core.requests import Delta, EngineRequest
from kvasir.ports.clock import Clock
from kvasir_workers.engines.sim.batch import PlannedStep
from kvasir_workers.engines.sim.fabric import SimLink
from kvasir_workers.engines.sim.scheduler import Scheduler
from kvasir_workers.engines.sim.state import SimPullOrder


class SimRank:
    """Steps `scheduler` from `start` to `stop`; see SimEngine for the duration of a step.

    `deliver` is called with each step's output, `broke` with the reason if the loop ended by an error.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        link: SimLink,
        timing: SimSpec,
        clock: Clock,
        *,
        deliver: Callable[[tuple[Delta, ...]], None],
        broke: Callable[[str], None],
    ) -> None:
        self.scheduler = scheduler
        self._link = link
        self._timing = timing
        self._clock = clock
        self._deliver_deltas = deliver
        self._broke = broke
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._steps: asyncio.Task[None] | None = None
        self._pulls: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str) -> None:
        """Start to step."""
        self._steps = asyncio.create_task(self._run(), name=name)

    async def stop(self) -> None:
        """End all tasks; undelivered output is dropped."""
        tasks = list(self._pulls.values())
        self._pulls.clear()
        if self._steps is not None:
            tasks.append(self._steps)
            self._steps = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.scheduler.close("engine_dead", "the engine has stopped", self._clock.now())
        self.scheduler.take_deltas()
        self._tell_progress()

    def submit(self, request: EngineRequest) -> None:
        """Queue a leg, or refuse it with a delta."""
        self.scheduler.submit(request, self._clock.now())
        self._wake.set()

    def abort(self, request_id: str) -> None:
        """End a leg; unknown ids are ignored."""
        if self.scheduler.abort(request_id, self._clock.now()):
            self._cancel_pull(request_id)
            self._wake.set()

    def release(self, lease_id: str) -> None:
        """End a lease; unknown ids are ignored."""
        self.scheduler.release(lease_id)
        self._wake.set()

    def crash(self, reason: str) -> None:
        """End every leg with ERROR `engine_dead` and refuse later ones."""
        self.scheduler.close("engine_dead", reason, self._clock.now())
        for request_id in list(self._pulls):
            self._cancel_pull(request_id)
        self._wake.set()

    async def progressed(self) -> None:
        """Return when a step has ended, or this rank's offers have changed otherwise."""
        await self._progress.wait()

    async def _run(self) -> None:
        try:
            await self._step_forever()
        except Exception as error:  # noqa: BLE001 - any error of the loop is the engine's failure
            self._broke(f"the step loop broke: {error!r}")
        while True:
            self._deliver()
            self._wake.clear()
            await self._wake.wait()

    def _deliver(self) -> None:
        self._tell_progress()
        self._deliver_deltas(self.scheduler.take_deltas())

    def _tell_progress(self) -> None:
        done, self._progress = self._progress, asyncio.Event()
        done.set()

    async def _step_forever(self) -> None:
        scheduler = self.scheduler
        while True:
            self._wake.clear()
            scheduler.expire(self._clock.now())
            step = scheduler.schedule(self._clock.now())
            for order in step.pulls:
                self._begin_pull(order)
            if step.work:
                await self._clock.sleep(self._duration(step))
                scheduler.complete(self._clock.now())
            self._deliver()
            if not step.work:
                await self._wait(scheduler.leases.next_deadline())

    def _duration(self, step: PlannedStep) -> float:
        timing = self._timing
        return (
            timing.decode_step_s
            + timing.decode_step_per_seq_s * len(step.work)
            + step.prefill_tokens / timing.prefill_tokens_per_s
        )

    async def _wait(self, deadline: float | None) -> None:
        """Wait until the state changes, or a lease expires."""
        if deadline is None:
            await self._wake.wait()
            return
        wake = asyncio.ensure_future(self._wake.wait())
        timer = asyncio.ensure_future(self._clock.sleep(deadline - self._clock.now()))
        try:
            await asyncio.wait((wake, timer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            wake.cancel()
            timer.cancel()

    def _begin_pull(self, order: SimPullOrder) -> None:
        task = asyncio.create_task(self._pull(order), name=f"sim-pull-{order.request_id}")
        self._pulls[order.request_id] = task

    async def _pull(self, order: SimPullOrder) -> None:
        started = self._clock.now()
        try:
            await self._link.pull(order)
        except TransferError as error:
            now = self._clock.now()
            self.scheduler.pull_failed(order, now - started, f"{error.code}: {error.message}", now)
        else:
            self.scheduler.pulled(order, self._clock.now() - started)
        if self._pulls.get(order.request_id) is asyncio.current_task():
            del self._pulls[order.request_id]
        self._wake.set()

    def _cancel_pull(self, request_id: str) -> None:
        task = self._pulls.pop(request_id, None)
        if task is not None:
            task.cancel()
