"""An engine wrapper that reports stale load or fails legs on request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import TierLoad
from kvasir.core.loads.gpu import GpuLoad
from kvasir.core.requests import Delta, EngineLoad, EngineRequest, FinishReason, StepBatch
from kvasir.ports.engine import Engine, StepSink
from kvasir_workers.engines.delegating import DelegatingEngine

_FULL, _WAITING = 0.98, 3
_COLD = 8


class FaultyEngine(DelegatingEngine):
    """`kvasir.ports.engine.Engine` around `engine`. While `failing` names an error code, every leg is
    answered with it. While `stale`, load keeps its value, and comes with no step. `tiers` are reported in
    place of the engine's, if there are any, and what it finds in its cache as found in them; `gpus` likewise,
    if there are any. While `full`, KV memory is reported as full, and requests as waiting for it. While
    `cold`, little is reported as found in the cache. `submitted` counts legs, refused ones included."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.failing: str | None = None
        self.submitted = 0
        self.full = False
        self.cold = False
        self.gpus: tuple[GpuLoad, ...] = ()
        self.tiers: tuple[TierLoad, ...] = ()
        self._sink: StepSink | None = None
        self._stale: EngineLoad | None = None

    @property
    def stale(self) -> bool:
        """Whether the reported load is frozen."""
        return self._stale is not None

    @stale.setter
    def stale(self, stale: bool) -> None:
        self._stale = self._engine.load() if stale else None

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        """See Engine."""
        self._sink = sink
        return await super().start(self._pass_on, worker_id=worker_id, epoch=epoch)

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """See Engine."""
        self.submitted += len(requests)
        if self.failing is None:
            super().submit(requests)
        else:
            asyncio.get_running_loop().call_soon(self._refuse, self.failing, tuple(requests))

    def load(self) -> EngineLoad:
        """See Engine."""
        load = self._stale or super().load()
        if self.full:
            load = replace(load, kv_usage=_FULL, waiting=load.waiting + _WAITING)
        load = replace(load, gpus=self.gpus) if self.gpus else load
        return replace(load, tiers=self.tiers) if self.tiers else load

    async def stop(self) -> None:
        """See Engine."""
        self._sink = None
        await super().stop()

    def _pass_on(self, batch: StepBatch) -> None:
        if self._sink is None:
            return
        if self.cold or self.tiers:
            batch = replace(batch, deltas=tuple(map(self._as_found, batch.deltas)))
        plain = self._stale is None and not (self.tiers or self.gpus or self.full)
        self._sink(batch if plain else replace(batch, load=None))

    def _as_found(self, delta: Delta) -> Delta:
        if delta.usage is None:
            return delta
        cached = delta.usage.cached_tokens // (_COLD if self.cold else 1)
        tiered = cached if self.tiers else 0
        return replace(delta, usage=replace(delta.usage, cached_tokens=cached, tier_tokens=tiered))

    def _refuse(self, code: str, requests: tuple[EngineRequest, ...]) -> None:
        if self._sink is None:
            return
        message = "the worker refuses everything"
        deltas = [
            Delta(r.request_id, 0, finish=FinishReason.ERROR, last=True, error=code, error_message=message)
            for r in requests
        ]
        self._sink(StepBatch(tuple(deltas)))
