"""An engine that passes everything on to another: the base of those that observe or disturb it."""

from __future__ import annotations

from collections.abc import Sequence

from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import EngineLoad, EngineRequest
from kvasir.ports.engine import Engine, KvSource, StepSink


class DelegatingEngine:
    """An Engine (port: kvasir.ports.engine) that delegates every method to `engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        """See Engine."""
        return await self._engine.start(sink, worker_id=worker_id, epoch=epoch)

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """See Engine."""
        self._engine.submit(requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        """See Engine."""
        self._engine.abort(request_ids)

    def release(self, lease_ids: Sequence[str]) -> None:
        """See Engine."""
        self._engine.release(lease_ids)

    @property
    def kv(self) -> KvSource | None:
        """See Engine."""
        return self._engine.kv

    def load(self) -> EngineLoad:
        """See Engine."""
        return self._engine.load()

    async def wait_failed(self) -> str:
        """See Engine."""
        return await self._engine.wait_failed()

    async def stop(self) -> None:
        """See Engine."""
        await self._engine.stop()
