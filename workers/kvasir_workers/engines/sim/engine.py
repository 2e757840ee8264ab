"""The simulated engine: the pure scheduler, stepped under a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvasir.config.spec import Deployment, PoolSpec
from kvasir.core.errors import ConfigError, TransferError
from kvasir.core.identity import KvLayout, WorkerIdentity
from kvasir.core.requests import EngineLoad, EngineRequest, StepBatch
from kvasir.ports.clock import Clock
from kvasir.ports.engine import StepSink
from kvasir_workers.engines.sim.batch import Step
from kvasir_workers.engines.sim.fabric import SimFabric, SimLink
from kvasir_workers.engines.sim.model import SimModel
from kvasir_workers.engines.sim.scheduler import Scheduler
from kvasir_workers.engines.sim.state import Limits, PullOrder

TRANSFER_NAME = "sim"
_VERSION = "1"
_MAX_LIVE = 65_536


class SimEngine:
    """`kvasir.ports.engine.Engine` without a model; timing comes from `pool.engine.sim`.

    A step lasts `decode_step_s` + `decode_step_per_seq_s` for each sequence + prompt tokens /
    `prefill_tokens_per_s`. Engines of one `fabric` pull from each other and end each other's leases;
    without one, KV offered by an engine in another process is taken on its ticket. `tokenizer_digest`
    is what the router will compare; tokens and text are simulated whatever the tokenizer.
    """

    def __init__(
        self,
        deployment: Deployment,
        pool: PoolSpec,
        *,
        clock: Clock,
        fabric: SimFabric | None = None,
        model: SimModel | None = None,
        tokenizer_digest: str = "",
        max_live: int = _MAX_LIVE,
    ) -> None:
        self._deployment = deployment
        self._pool = pool
        self._clock = clock
        self._fabric = fabric
        self._model = model or SimModel()
        self._tokenizer_digest = tokenizer_digest
        self._max_live = max_live
        self._link = SimLink(clock, pool.engine.sim, deployment.transfer.timeout_s, fabric)
        self._worker_id = ""
        self._epoch = 0
        self._scheduler: Scheduler | None = None
        self._wake = asyncio.Event()
        self._steps: asyncio.Task[None] | None = None
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[str] | None = None

    # -- the port ----------------------------------------------------------------------------------

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        """See Engine. Raises ConfigError for what the simulation does not model."""
        self._refuse_unmodelled()
        layout = self._layout()
        limits = self._limits(layout)
        self._worker_id, self._epoch = worker_id, epoch
        self._scheduler = Scheduler(limits, self._model, worker_id=worker_id, epoch=epoch)
        self._failed = asyncio.get_running_loop().create_future()
        if self._fabric is not None:
            self._fabric.join(worker_id, self)
        self._steps = asyncio.create_task(self._run(self._scheduler, sink), name=f"sim-steps-{worker_id}")
        return self._identity(layout, limits)

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """See Engine."""
        for request in requests:
            self._started.submit(request, self._clock.now())
        self._wake.set()

    def abort(self, request_ids: Sequence[str]) -> None:
        """See Engine."""
        for request_id in request_ids:
            if self._started.abort(request_id, self._clock.now()):
                self._cancel_pull(request_id)
        self._wake.set()

    def release(self, lease_ids: Sequence[str]) -> None:
        """See Engine."""
        for lease_id in lease_ids:
            self._started.release(lease_id)
        self._wake.set()

    def load(self) -> EngineLoad:
        """See Engine."""
        self._started.expire(self._clock.now())
        return self._started.load()

    async def wait_failed(self) -> str:
        """See Engine."""
        if self._failed is None:
            raise RuntimeError("the engine has not been started")
        return await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """See Engine."""
        if self._steps is None:
            return
        tasks = [self._steps, *self._pulls.values()]
        self._steps = None
        self._pulls.clear()
        if self._fabric is not None:
            self._fabric.leave(self._worker_id, self)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._started.close("worker_failed", "the engine has stopped", self._clock.now())
        self._started.take_deltas()

    # -- the fabric's view -------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """See Offerer."""
        return self._epoch

    def lease_problem(self, lease_id: str, fence: int) -> str | None:
        """See Offerer."""
        self._started.expire(self._clock.now())
        lease = self._started.leases.find(lease_id)
        if lease is None:
            return "expired"
        return None if lease.fence == fence else "fenced"

    def lease_pulled(self, lease_id: str) -> None:
        """See Offerer."""
        self.release((lease_id,))

    # -- for tests and fault injection -------------------------------------------------------------

    def crash(self, reason: str) -> None:
        """Die as an engine does: every request ends with ERROR `worker_failed`, nothing more is
        computed, peers cannot pull, and `wait_failed` returns `reason`."""
        self._started.close("worker_failed", reason, self._clock.now())
        for request_id in list(self._pulls):
            self._cancel_pull(request_id)
        if self._fabric is not None:
            self._fabric.leave(self._worker_id, self)
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(reason)
        self._wake.set()

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks, leases and requests do not account for each other."""
        self._started.check_integrity()

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _started(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError("the engine has not been started")
        return self._scheduler

    async def _run(self, scheduler: Scheduler, sink: StepSink) -> None:
        try:
            await self._step_forever(scheduler, sink)
        except Exception as error:  # noqa: BLE001 - whatever breaks the loop is the engine's death
            self.crash(f"the step loop broke: {error!r}")
        while True:
            self._deliver(scheduler, sink)
            self._wake.clear()
            await self._wake.wait()

    def _deliver(self, scheduler: Scheduler, sink: StepSink) -> None:
        deltas = scheduler.take_deltas()
        if deltas:
            sink(StepBatch(deltas, scheduler.load()))

    async def _step_forever(self, scheduler: Scheduler, sink: StepSink) -> None:
        while True:
            self._wake.clear()
            scheduler.expire(self._clock.now())
            step = scheduler.schedule(self._clock.now())
            for order in step.pulls:
                self._begin_pull(scheduler, order)
            if step.work:
                await self._clock.sleep(self._duration(step))
                scheduler.complete(self._clock.now())
            self._deliver(scheduler, sink)
            if not step.work:
                await self._wait(scheduler.leases.next_deadline())

    def _duration(self, step: Step) -> float:
        timing = self._pool.engine.sim
        return (
            timing.decode_step_s
            + timing.decode_step_per_seq_s * len(step.work)
            + step.prefill_tokens / timing.prefill_tokens_per_s
        )

    async def _wait(self, deadline: float | None) -> None:
        """Until something changes, or a lease ends by itself."""
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

    def _begin_pull(self, scheduler: Scheduler, order: PullOrder) -> None:
        task = asyncio.create_task(self._pull(scheduler, order), name=f"sim-pull-{order.request_id}")
        self._pulls[order.request_id] = task

    async def _pull(self, scheduler: Scheduler, order: PullOrder) -> None:
        started = self._clock.now()
        try:
            await self._link.pull(order)
        except TransferError as error:
            now = self._clock.now()
            scheduler.pull_failed(order, now - started, f"{error.code}: {error.message}", now)
        else:
            scheduler.pulled(order, self._clock.now() - started)
        if self._pulls.get(order.request_id) is asyncio.current_task():
            del self._pulls[order.request_id]
        self._wake.set()

    def _cancel_pull(self, request_id: str) -> None:
        task = self._pulls.pop(request_id, None)
        if task is not None:
            task.cancel()

    def _refuse_unmodelled(self) -> None:
        engine = self._pool.engine
        if engine.data_parallel_size > 1:
            raise ConfigError("the simulated engine has one rank: raise pool.replicas instead")
        if engine.speculative is not None:
            raise ConfigError("the simulated engine does not speculate: remove engine.speculative")

    def _layout(self) -> KvLayout:
        engine = self._pool.engine
        fp8 = engine.kv_dtype == "fp8"
        return KvLayout(
            block_size=engine.block_size,
            dtype="fp8" if fp8 else self._deployment.model.dtype,
            layout=self._model.kv_layout,
            layers=self._model.layers,
            kv_heads=self._model.kv_heads,
            head_size=self._model.head_size,
            bytes_per_block=self._model.bytes_per_token(fp8=fp8) * engine.block_size,
            tensor_parallel_size=engine.tensor_parallel_size,
        )

    def _limits(self, layout: KvLayout) -> Limits:
        engine, transfer = self._pool.engine, self._deployment.transfer
        return Limits(
            block_size=engine.block_size,
            blocks=engine.kv_cache_bytes // layout.bytes_per_block,
            bytes_per_block=layout.bytes_per_block,
            max_model_len=self._deployment.model.max_model_len,
            max_seqs=engine.max_num_seqs,
            step_tokens=engine.max_num_batched_tokens,
            chunked_prefill=engine.chunked_prefill,
            prefix_caching=engine.prefix_caching,
            lease_s=transfer.lease_s,
            recompute_on_failure=transfer.on_failure == "recompute",
            max_live=self._max_live,
            seed=engine.seed,
            adapters=frozenset(lora.name for lora in self._deployment.lora),
        )

    def _identity(self, layout: KvLayout, limits: Limits) -> WorkerIdentity:
        model = self._deployment.model
        return WorkerIdentity(
            worker_id=self._worker_id,
            epoch=self._epoch,
            pool=self._pool.name,
            role=self._pool.role,
            model=model.name,
            revision=model.revision,
            tokenizer_digest=self._tokenizer_digest,
            max_model_len=model.max_model_len,
            kv=layout,
            kv_blocks=limits.blocks,
            engine="sim",
            engine_version=_VERSION,
            transfer=TRANSFER_NAME if self._deployment.disaggregated else "",
            adapters=tuple(sorted(limits.adapters)),
        )
