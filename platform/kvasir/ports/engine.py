"""The port of inference engines: legs of requests in, one batch of deltas per step out.

It is vLLM's interface, reduced to what serving needs, with batches instead of per-request streams: one engine
step yields tokens for every running request, and wire, machine and fan-out keep this grouping because it
makes tokens cheap.
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
    """A worker's shadow of the blocks that its engine holds. Called on the engine's event loop."""

    @property
    def incomplete(self) -> str | None:
        """Why the record is incomplete at present; None if it is complete."""
        ...

    def subscribe(self, sink: KvSink | None) -> None:
        """Call `sink` with every later batch, in order; of the methods of this port, only `flush` calls it.
        None unsubscribes."""
        ...

    def flush(self) -> None:
        """Deliver pending changes, so that they are sent with their step. Otherwise they are delivered within
        some milliseconds."""
        ...

    def snapshot(self) -> AsyncGenerator[KvSnapshotPart, None]:
        """Yield all held blocks in parts of bounded size; the event loop runs between parts. Raises
        CapacityError with the reason if the record is or becomes incomplete."""
        ...


class Engine(Protocol):
    """One engine replica. All methods are called from the event loop that ran `start`.

    Obligations:
    - every submitted request ends in exactly one delta with `last=True`: finished, refused (finish=ERROR with
      a stable code), aborted (finish=ABORT) or lost;
    - offsets of one choice are contiguous from 0;
    - the sink is called on the event loop, once per step, never concurrently and never re-entrantly
      from `submit` or `abort`;
    - `submit` never raises for a bad request: the refusal is a delta;
    - after `stop` nothing is delivered.
    """

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        """Load the model, warm up, and return the worker's identity. Raises ConfigError with the reason and
        the remedy if the engine cannot start."""
        ...

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Queue legs. A live request_id is refused with code `duplicate_request`."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these requests; unknown or finished ids are ignored. Each live one ends with finish=ABORT, and
        its blocks and leases are freed."""
        ...

    def release(self, lease_ids: Sequence[str]) -> None:
        """Free KV that was offered under these leases and will not be pulled; unknown ids are ignored."""
        ...

    @property
    def kv(self) -> KvSource | None:
        """The source of prefix cache changes, or None if the engine does not report them. The same before and
        after `start`."""
        ...

    def load(self) -> EngineLoad:
        """Return the latest load. Cheap; never blocks."""
        ...

    async def wait_failed(self) -> str:
        """Wait until the engine dies and return the reason. The worker then ends."""
        ...

    async def stop(self) -> None:
        """Abort remaining requests and free all resources. Idempotent."""
        ...
