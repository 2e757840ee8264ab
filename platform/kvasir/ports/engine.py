"""The inference engine as Kvasir sees it: legs of requests in, one batch of deltas per step out.

The shape is vLLM's, reduced to what serving needs. Batches, not per-request streams: one engine step
yields tokens for every running request, and everything downstream (wire, machine, fan-out) keeps that
grouping because it is what makes a token cheap.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from kvasir.core.identity import WorkerIdentity
from kvasir.core.kv import KvBatch, KvSnapshotPart
from kvasir.core.requests import EngineLoad, EngineRequest, StepBatch

StepSink = Callable[[StepBatch], None]
KvSink = Callable[[KvBatch], None]


class KvSource(Protocol):
    """A worker's own record of the blocks that its engine holds. Called on the engine's event loop."""

    @property
    def incomplete(self) -> str | None:
        """Why the record does not say all that is held, for the time being; None when it does."""
        ...

    def subscribe(self, sink: KvSink | None) -> None:
        """Hand every batch to `sink` from here on, in order; of the calls of this port only from within
        `flush`. None: to nobody."""
        ...

    def flush(self) -> None:
        """Hand over what is not handed over yet, so that it can travel with the step that it belongs
        to; without it that happens within some milliseconds."""
        ...

    def snapshot(self) -> AsyncGenerator[KvSnapshotPart, None]:
        """Everything that is held, in parts of bounded size between which the event loop runs. Raises
        CapacityError with the reason while the record is incomplete, and when it becomes so."""
        ...


class Engine(Protocol):
    """One engine replica. All methods are called from the event loop that ran `start`.

    Obligations:
    - every submitted request ends in exactly one delta with `last=True`, whatever happens to it:
      finished, refused (finish=ERROR with a stable code), aborted (finish=ABORT) or lost;
    - offsets of one choice are contiguous from 0;
    - the sink is called on the event loop, once per step, never concurrently and never re-entrantly
      from `submit` or `abort`;
    - `submit` never raises for a bad request: the refusal is a delta;
    - after `stop` nothing is delivered.
    """

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        """Load the model and warm up; returns who this worker is. Raises ConfigError with the
        reason and the remedy when the engine cannot start."""
        ...

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Queue legs. A request_id that is still live is refused with code `duplicate_request`."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these; unknown or finished ids are ignored. Each live one ends with finish=ABORT and
        its blocks and leases are freed."""
        ...

    def release(self, lease_ids: Sequence[str]) -> None:
        """Free KV that was offered under these leases and will not be pulled; unknown ids are
        ignored."""
        ...

    @property
    def kv(self) -> KvSource | None:
        """What this engine holds in its prefix cache; None for one that does not tell. The same before
        and after `start`."""
        ...

    def load(self) -> EngineLoad:
        """The newest load; cheap, never blocks."""
        ...

    async def wait_failed(self) -> str:
        """Return why the engine died, when it does; otherwise wait. The worker leaves on it."""
        ...

    async def stop(self) -> None:
        """Abort what is left and free everything. Idempotent."""
        ...
