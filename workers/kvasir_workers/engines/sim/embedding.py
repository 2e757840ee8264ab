"""The simulated engine of an embed pool: vectors that depend only on the tokens, after the time that a prompt
of their length takes."""

from __future__ import annotations

import asyncio
import hashlib
import math
from array import array
from collections.abc import Sequence

from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.golden import GoldenPrompt
from kvasir.core.identity import NO_KV, WorkerIdentity
from kvasir.core.requests import Delta, EngineLoad, EngineRequest, FinishReason, StepBatch, Timings, Usage
from kvasir.ports.clock import Clock
from kvasir.ports.engine import KvSource, StepSink
from kvasir_workers.engines.embedding import ended, refusal

DIMENSIONS = 256
"""Dimensions of kvasir-tiny."""
_VERSION = "1"
_MAX_LIVE = 65_536
_HALF = 1 << 31


def simulated_embedding(tokens: array[int], adapter: str | None = None) -> array[float]:
    """Return a vector of length 1, the same for the same tokens on every worker."""
    seed = f"{adapter or ''}/".encode() + tokens.tobytes()
    drawn = array("I", hashlib.shake_128(seed).digest(DIMENSIONS * array("I").itemsize))
    values = [number / _HALF - 1.0 for number in drawn]
    norm = math.sqrt(math.fsum(value * value for value in values))
    return array("f", (value / norm for value in values))


def simulated_classes(tokens: array[int], classes: int, adapter: str | None = None) -> array[float]:
    """Return probabilities of `classes`, the same for the same tokens on every worker: at least one number
    between 0 and 1, several with the sum 1."""
    sizes = list(map(abs, simulated_embedding(tokens, adapter)[:classes]))
    whole = math.fsum(sizes) if classes > 1 else 1.0
    return array("f", (size / whole for size in sizes))


class SimEmbeddingEngine:
    """`kvasir.ports.engine.Engine` that embeds, without a model; timing comes from `pool.engine.sim`.

    A batch has the inputs that fit into `max_num_seqs` and `max_num_batched_tokens`, in the order of priority
    and arrival, and takes `decode_step_s` + `decode_step_per_seq_s` for each input + tokens /
    `prefill_tokens_per_s`. With `classes`, up to DIMENSIONS, it computes probabilities of that many.
    `tokenizer_digest` and `golden` are compared by the router.
    """

    def __init__(
        self,
        deployment: Deployment,
        pool: PoolSpec,
        *,
        clock: Clock,
        tokenizer_digest: str = "",
        golden: tuple[GoldenPrompt, ...] = (),
        max_live: int = _MAX_LIVE,
        classes: int = 0,
    ) -> None:
        self._deployment = deployment
        self._pool = pool
        self._clock = clock
        self._tokenizer_digest = tokenizer_digest
        self._golden = golden
        self._max_live = max_live
        self._classes = classes
        self._adapters = tuple(sorted(lora.name for lora in deployment.lora))
        self._live: dict[str, tuple[EngineRequest, float]] = {}
        self._running: list[str] = []
        self._deltas: list[Delta] = []
        self._wake = asyncio.Event()
        self._steps: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[str] | None = None

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        """See Engine."""
        self._failed = asyncio.get_running_loop().create_future()
        self._steps = asyncio.create_task(self._step_forever(sink), name=f"sim-embeddings-{worker_id}")
        model = self._deployment.model
        return WorkerIdentity(
            worker_id=worker_id,
            epoch=epoch,
            pool=self._pool.name,
            role=self._pool.role,
            model=model.name,
            revision=model.revision,
            tokenizer_digest=self._tokenizer_digest,
            max_model_len=model.context_length,
            kv=NO_KV,
            kv_blocks=0,
            engine="sim",
            engine_version=_VERSION,
            adapters=self._adapters,
            golden=self._golden,
        )

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """See Engine."""
        for request in requests:
            why = self._refusal(request)
            if why is None:
                self._live[request.request_id] = (request, self._clock.now())
            else:
                self._deltas.append(ended(request, FinishReason.ERROR, *why))
        self._wake.set()

    def abort(self, request_ids: Sequence[str]) -> None:
        """See Engine."""
        for request_id in request_ids:
            live = self._live.pop(request_id, None)
            if live is not None:
                self._deltas.append(ended(live[0], FinishReason.ABORT))
        self._wake.set()

    def release(self, lease_ids: Sequence[str]) -> None:
        """See Engine. Nothing is ever offered."""

    @property
    def kv(self) -> KvSource | None:
        """See Engine."""
        return None

    def load(self) -> EngineLoad:
        """See Engine."""
        running = sum(request_id in self._live for request_id in self._running)
        return EngineLoad(running=running, waiting=len(self._live) - running)

    async def wait_failed(self) -> str:
        """See Engine."""
        if self._failed is None:
            raise RuntimeError("the engine has not been started")
        return await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """See Engine."""
        task, self._steps = self._steps, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._live.clear()

    def crash(self, reason: str) -> None:
        """Fail as an engine does: every request, and every later one, ends with ERROR `engine_dead`."""
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(reason)
        self._deltas += [
            ended(request, FinishReason.ERROR, "engine_dead", reason) for request, _ in self._live.values()
        ]
        self._live.clear()
        self._wake.set()

    # -- inside ------------------------------------------------------------------------------------

    def _refusal(self, request: EngineRequest) -> tuple[str, str] | None:
        if self._failed is not None and self._failed.done():
            return "engine_dead", self._failed.result()
        if request.request_id in self._live:
            return "duplicate_request", f"{request.request_id} is still live"
        if len(self._live) >= self._max_live:
            return "no_capacity", f"{self._max_live} requests are live on this worker"
        return refusal(request, adapters=self._adapters, max_tokens=self._deployment.model.context_length)

    async def _step_forever(self, sink: StepSink) -> None:
        while True:
            batch = self._next_batch()
            self._running = [request.request_id for request, _ in batch]
            if batch:
                started = self._clock.now()
                await self._clock.sleep(self._duration([request for request, _ in batch]))
                for request, arrived_s in batch:
                    self._complete(request, started - arrived_s, self._clock.now() - started)
                self._running = []
            deltas, self._deltas = tuple(self._deltas), []
            if deltas:
                sink(StepBatch(deltas, self.load()))
            if not self._live:
                self._wake.clear()
                if not self._deltas:
                    await self._wake.wait()

    def _vector(self, request: EngineRequest) -> array[float]:
        if self._classes:
            return simulated_classes(request.tokens, self._classes, request.adapter)
        return simulated_embedding(request.tokens, request.adapter)

    def _next_batch(self) -> list[tuple[EngineRequest, float]]:
        engine, tokens = self._pool.engine, 0
        batch: list[tuple[EngineRequest, float]] = []
        for request, arrived_s in sorted(self._live.values(), key=lambda live: live[0].priority):
            tokens += len(request.tokens)
            if batch and (len(batch) >= engine.max_num_seqs or tokens > engine.max_num_batched_tokens):
                break
            batch.append((request, arrived_s))
        return batch

    def _duration(self, batch: list[EngineRequest]) -> float:
        timing = self._pool.engine.sim
        tokens = sum(len(request.tokens) for request in batch)
        return (
            timing.decode_step_s
            + timing.decode_step_per_seq_s * len(batch)
            + tokens / timing.prefill_tokens_per_s
        )

    def _complete(self, request: EngineRequest, queue_s: float, prefill_s: float) -> None:
        if self._live.pop(request.request_id, None) is None:
            return
        self._deltas.append(
            Delta(
                request_id=request.request_id,
                offset=0,
                finish=FinishReason.STOP,
                last=True,
                usage=Usage(prompt_tokens=len(request.tokens)),
                timings=Timings(queue_s=queue_s, prefill_s=prefill_s),
                embedding=self._vector(request),
            )
        )
