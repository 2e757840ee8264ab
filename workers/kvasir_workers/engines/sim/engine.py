"""The simulated engine: pure schedulers, one for each data-parallel rank, stepped by a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.errors import ConfigError
from kvasir.core.golden import GoldenPrompt
from kvasir.core.identity import KvLayout, WorkerIdentity
from kvasir.core.requests import Delta, EngineLoad, EngineRequest, StepBatch
from kvasir.native import root_hash
from kvasir.ports.clock import Clock
from kvasir.ports.engine import KvSource, StepSink
from kvasir.sizing.host import SMALL_KV_BYTES
from kvasir_workers.engines.sim.fabric import SimFabric, SimLink
from kvasir_workers.engines.sim.model import SimModel
from kvasir_workers.engines.sim.rank import SimRank
from kvasir_workers.engines.sim.reporting import CacheReport
from kvasir_workers.engines.sim.scheduler import Scheduler
from kvasir_workers.engines.sim.state import SimLimits
from kvasir_workers.server.holdings import Holdings

TRANSFER_NAME = "sim"
_VERSION = "1"
_MAX_LIVE = 65_536


class SimEngine:
    """`kvasir.ports.engine.Engine` without a model; timing comes from `pool.engine.sim`.

    A step takes `decode_step_s` + `decode_step_per_seq_s` for each sequence + prompt tokens /
    `prefill_tokens_per_s`. Engines of one `fabric` pull from each other and end each other's leases; without
    a fabric, KV offered by an engine in another process is accepted on its ticket alone. `tokenizer_digest`
    and `golden` are compared by the router; tokens and text are simulated whatever the tokenizer. Each
    data-parallel rank steps by itself and has its own KV blocks and `max_live` legs; a leg without a rank
    runs on the one with the fewest.
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
        golden: tuple[GoldenPrompt, ...] = (),
        max_live: int = _MAX_LIVE,
    ) -> None:
        self._deployment = deployment
        self._pool = pool
        self._clock = clock
        self._fabric = fabric
        self._model = model or SimModel()
        self._tokenizer_digest = tokenizer_digest
        self._golden = golden
        self._max_live = max_live
        engine = pool.engine
        self._link = SimLink(clock, engine.sim, deployment.transfer.stall_timeout_s, fabric)
        self._holdings: Holdings | None = None
        if engine.kv_events and engine.prefix_caching:
            root_of = partial(root_hash, deployment.model.name)
            self._holdings = Holdings(engine.data_parallel_size, root_of)
        self._adapters = {lora.name for lora in deployment.lora}
        self._worker_id = ""
        self._epoch = 0
        self._ranks: tuple[SimRank, ...] = ()
        self._running = False
        self._failed: asyncio.Future[str] | None = None

    # -- the port ----------------------------------------------------------------------------------

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        """See Engine. Raise ConfigError for settings that the simulation does not model."""
        self._refuse_unmodelled()
        layout = self._layout()
        limits = self._limits(layout)
        self._worker_id, self._epoch = worker_id, epoch
        self._failed = asyncio.get_running_loop().create_future()
        if self._holdings is not None:
            self._holdings.begin(epoch)
        if self._fabric is not None:
            self._fabric.join(worker_id, self)
        self._ranks = tuple(self._make_rank(limits, number, sink) for number in range(limits.ranks))
        self._running = True
        for number, rank in enumerate(self._ranks):
            rank.start(f"sim-steps-{worker_id}-{number}")
        return self._identity(layout, limits)

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """See Engine."""
        for request in requests:
            self._rank_for(request).submit(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """See Engine."""
        for rank in self._started:
            for request_id in request_ids:
                rank.abort(request_id)

    def release(self, lease_ids: Sequence[str]) -> None:
        """See Engine."""
        for rank in self._started:
            for lease_id in lease_ids:
                rank.release(lease_id)

    @property
    def kv(self) -> KvSource | None:
        """See Engine."""
        return self._holdings

    def load(self) -> EngineLoad:
        """See Engine."""
        for rank in self._started:
            rank.scheduler.expire(self._clock.now())
        return self._load()

    async def add_adapter(self, key: str, folder: Path) -> None:
        """See AdapterEngine. The files have no effect."""
        self._adapters.add(key)

    async def remove_adapter(self, key: str) -> None:
        """See AdapterEngine."""
        self._adapters.discard(key)

    def adapter_legs(self, key: str) -> int:
        """See AdapterEngine."""
        return sum(rank.scheduler.legs_of(key) for rank in self._ranks)

    async def wait_failed(self) -> str:
        """See Engine."""
        if self._failed is None:
            raise RuntimeError("the engine has not been started")
        return await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """See Engine."""
        if not self._running:
            return
        self._running = False
        if self._fabric is not None:
            self._fabric.leave(self._worker_id, self)
        await asyncio.gather(*(rank.stop() for rank in self._ranks))

    # -- the fabric's view -------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """See Offerer."""
        return self._epoch

    def lease_problem(self, lease_id: str, fence: int) -> str | None:
        """See Offerer."""
        for rank in self._started:
            rank.scheduler.expire(self._clock.now())
            lease = rank.scheduler.leases.find(lease_id)
            if lease is not None:
                return None if lease.fence == fence else "fenced"
        return "expired"

    def lease_pulled(self, lease_id: str) -> None:
        """See Offerer."""
        self.release((lease_id,))

    def complete(self, lease_id: str) -> int:
        """See Offerer."""
        leases = (rank.scheduler.leases.find(lease_id) for rank in self._started)
        return sum(len(lease.blocks) for lease in leases if lease is not None)

    async def progressed(self) -> None:
        """See Offerer."""
        waits = [asyncio.ensure_future(rank.progressed()) for rank in self._started]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    # -- for tests and fault injection -------------------------------------------------------------

    def crash(self, reason: str) -> None:
        """Fail as an engine does: every request ends with ERROR `engine_dead`, computation stops, peers
        cannot pull, and `wait_failed` returns `reason`."""
        for rank in self._started:
            rank.crash(reason)
        if self._fabric is not None:
            self._fabric.leave(self._worker_id, self)
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(reason)

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, leases and requests are inconsistent, or the record of cached
        blocks differs from the cache."""
        for number, rank in enumerate(self._started):
            rank.scheduler.check_integrity()
            if self._holdings is not None:
                recorded, cached = self._holdings.held(number), len(rank.scheduler.cached())
                if recorded != cached:
                    raise AssertionError(f"rank {number}: {recorded} blocks on record, {cached} cached")

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _started(self) -> tuple[SimRank, ...]:
        if not self._ranks:
            raise RuntimeError("the engine has not been started")
        return self._ranks

    def _make_rank(self, limits: SimLimits, number: int, sink: StepSink) -> SimRank:
        report = None if self._holdings is None else CacheReport(self._holdings, number, limits.block_size)
        scheduler = Scheduler(
            limits, self._model, worker_id=self._worker_id, epoch=self._epoch, rank=number, report=report
        )
        return SimRank(
            scheduler,
            self._link,
            self._pool.engine.sim,
            self._clock,
            deliver=partial(self._deliver, sink),
            broke=self.crash,
        )

    def _rank_for(self, request: EngineRequest) -> SimRank:
        ranks = self._started
        for rank in ranks:
            if rank.scheduler.is_live(request.request_id):
                return rank
        named = request.data_parallel_rank
        if named is not None:
            # A rank that does not exist is refused by any scheduler.
            return ranks[named] if 0 <= named < len(ranks) else ranks[0]
        return min(ranks, key=lambda rank: rank.scheduler.live)

    def _deliver(self, sink: StepSink, deltas: tuple[Delta, ...]) -> None:
        if self._holdings is not None:
            self._holdings.flush()
        if deltas:
            sink(StepBatch(deltas, self._load()))

    def _load(self) -> EngineLoad:
        loads = [rank.scheduler.load() for rank in self._ranks]
        if len(loads) == 1:
            return loads[0]
        names = [field.name for field in fields(EngineLoad) if field.name not in ("tiers", "gpus")]
        summed = {name: sum(getattr(load, name) for load in loads) for name in names}
        summed["kv_usage"] /= len(loads)
        return EngineLoad(**summed)

    def _refuse_unmodelled(self) -> None:
        engine = self._pool.engine
        if engine.speculative is not None:
            raise ConfigError("the simulated engine does not speculate: remove engine.speculative")

    def _layout(self) -> KvLayout:
        engine = self._pool.engine
        fp8 = engine.kv_dtype.startswith("fp8")
        return KvLayout(
            block_size=engine.block_size,
            dtype=engine.kv_dtype if fp8 else self._deployment.model.dtype,
            layout=self._model.kv_layout,
            layers=self._model.layers,
            kv_heads=self._model.kv_heads,
            head_size=self._model.head_size,
            bytes_per_block=self._model.bytes_per_token(fp8=fp8) * engine.block_size,
            tensor_parallel_size=engine.tensor_parallel_size,
        )

    def _limits(self, layout: KvLayout) -> SimLimits:
        engine, transfer = self._pool.engine, self._deployment.transfer
        return SimLimits(
            block_size=engine.block_size,
            blocks=self._kv_bytes(layout) // layout.bytes_per_block,
            bytes_per_block=layout.bytes_per_block,
            max_model_len=self._deployment.model.context_length,
            max_seqs=engine.max_num_seqs,
            step_tokens=engine.max_num_batched_tokens,
            chunked_prefill=engine.chunked_prefill,
            prefix_caching=engine.prefix_caching,
            lease_s=transfer.lease_s,
            recompute_on_failure=transfer.on_failure == "recompute",
            max_live=self._max_live,
            seed=engine.seed,
            adapters=self._adapters,
            ranks=engine.data_parallel_size,
            # Without a fabric a puller could not know what is computed.
            overlap=transfer.overlap != "never" and engine.chunked_prefill and self._fabric is not None,
        )

    def _kv_bytes(self, layout: KvLayout) -> int:
        """Return the size of the cache: the spec's, or that of a small model, if a request fits in it."""
        if self._pool.engine.kv_cache_bytes is not None:
            return self._pool.engine.kv_cache_bytes
        request = -(-self._deployment.model.context_length // layout.block_size) * layout.bytes_per_block
        return max(SMALL_KV_BYTES, request)

    def _identity(self, layout: KvLayout, limits: SimLimits) -> WorkerIdentity:
        model = self._deployment.model
        return WorkerIdentity(
            worker_id=self._worker_id,
            epoch=self._epoch,
            pool=self._pool.name,
            role=self._pool.role,
            model=model.name,
            revision=model.revision,
            tokenizer_digest=self._tokenizer_digest,
            max_model_len=model.context_length,
            kv=layout,
            kv_blocks=limits.blocks,
            engine="sim",
            engine_version=_VERSION,
            transfer=TRANSFER_NAME if self._deployment.disaggregated else "",
            adapters=tuple(sorted(lora.name for lora in self._deployment.lora)),
            data_parallel_size=limits.ranks,
            reports_kv=self._holdings is not None,
            any_role=True,
            images=True,
            media=("video", "audio"),
            golden=self._golden,
        )
