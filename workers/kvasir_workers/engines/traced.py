"""Writes the spans of an engine's legs, so that a trace shows what happened inside a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import Delta, EngineRequest, StepBatch
from kvasir.ports.clock import Clock
from kvasir.ports.engine import Engine, StepSink
from kvasir.telemetry.leg_spans import LegSpanRecorder
from kvasir_workers.engines.delegating import DelegatingEngine


class TracedEngine(DelegatingEngine):
    """An Engine whose legs with a trace context are recorded by `spans`, which it closes at the end."""

    def __init__(self, engine: Engine, spans: LegSpanRecorder, clock: Clock) -> None:
        super().__init__(engine)
        self._spans = spans
        self._clock = clock
        self._live: dict[str, tuple[EngineRequest, float]] = {}

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        """See Engine."""

        def traced(batch: StepBatch) -> None:
            sink(batch)
            # After the tokens are on their way.
            for delta in batch.deltas:
                if delta.last and delta.error != "duplicate_request":
                    self._ended(delta)

        return await super().start(traced, worker_id=worker_id, epoch=epoch)

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """See Engine."""
        now = self._clock.now()
        for request in requests:
            # A second leg with this id is refused, and the first goes on.
            if request.trace_context:
                self._live.setdefault(request.request_id, (request, now))
        super().submit(requests)

    async def stop(self) -> None:
        """See Engine."""
        await super().stop()
        self._live.clear()
        await asyncio.to_thread(self._spans.close)

    def _ended(self, last: Delta) -> None:
        begun = self._live.pop(last.request_id, None)
        if begun is not None:
            request, submitted_s = begun
            self._spans.record(request, last, elapsed_s=self._clock.now() - submitted_s)
