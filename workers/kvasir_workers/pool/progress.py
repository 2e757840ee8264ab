"""Detects an engine that has work and makes no progress.

A dead engine reports its failure (`Engine.wait_failed`). An engine that hangs, with its process and event
loop alive, reports nothing: its requests wait forever, and it appears healthy.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import EngineLoad, EngineRequest, StepBatch
from kvasir.ports.clock import Clock
from kvasir.ports.engine import Engine, StepSink
from kvasir_workers.engines.delegating import DelegatingEngine

STUCK_S = 60.0


class WatchedEngine(DelegatingEngine):
    """An Engine whose progress is watched (port: kvasir.ports.engine). Progress is a step that delivers
    output, or a load that changes, as it does with each chunk of a long prompt."""

    def __init__(self, engine: Engine, clock: Clock, *, stuck_s: float = STUCK_S) -> None:
        super().__init__(engine)
        self._clock = clock
        self._stuck_s = stuck_s
        self._live: set[str] = set()
        self._load = EngineLoad()
        self._moved_s = clock.now()

    def stuck(self) -> str | None:
        """Return why the engine is considered hung: it has had requests without progress for `stuck_s`
        seconds. None if it makes progress or has no requests. Call it at least a few times within
        `stuck_s`."""
        now, load = self._clock.now(), self._engine.load()
        if load != self._load or not self._live:
            self._load, self._moved_s = load, now
        silent_s = now - self._moved_s
        if silent_s < self._stuck_s:
            return None
        return f"the engine has made no progress for {silent_s:.0f} s, with {len(self._live)} requests live"

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        """See Engine."""

        def watched(batch: StepBatch) -> None:
            self._moved_s = self._clock.now()
            for delta in batch.deltas:
                if delta.last:
                    self._live.discard(delta.request_id)
            sink(batch)

        return await super().start(watched, worker_id=worker_id, epoch=epoch)

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """See Engine."""
        if not self._live:
            self._moved_s = self._clock.now()
        self._live.update(request.request_id for request in requests)
        super().submit(requests)
