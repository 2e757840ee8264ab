"""An engine that says what a test wants, for the wrappers of engines."""

from __future__ import annotations

from collections.abc import Sequence

from kvasir.core.identity import KvLayout, WorkerIdentity
from kvasir.core.requests import Delta, EngineLoad, EngineRequest, Role, StepBatch
from kvasir.ports.engine import KvSource, StepSink

IDENTITY = WorkerIdentity(
    "w",
    1,
    "decode",
    Role.DECODE,
    "m",
    "main",
    "digest",
    100,
    KvLayout(32, "f", "l", 1, 1, 1, 1),
    10,
    "e",
    "1",
)


class StubEngine:
    """An Engine that does nothing; `say` delivers a step."""

    kv: KvSource | None = None

    def __init__(self) -> None:
        self.newest = EngineLoad()
        self.sink: StepSink | None = None

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        self.sink = sink
        return IDENTITY

    def submit(self, requests: Sequence[EngineRequest]) -> None: ...

    def abort(self, request_ids: Sequence[str]) -> None: ...

    def release(self, lease_ids: Sequence[str]) -> None: ...

    def load(self) -> EngineLoad:
        return self.newest

    async def wait_failed(self) -> str:
        return "dead"

    async def stop(self) -> None: ...

    def say(self, *deltas: Delta) -> None:
        assert self.sink is not None
        self.sink(StepBatch(deltas))
