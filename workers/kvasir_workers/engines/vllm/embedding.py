"""vLLM's pooling runner behind the engine port: inputs in, one vector each out, an embedding or the
probabilities of classes.

A class separate from the generating engine, because an embedding needs no hand-off, tiers, continuation,
events or streaming. vLLM batches waiting inputs at every step, so no batching window is needed here: inputs
that arrive while a batch is computed form the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kvasir.config.load.model_support import served_classes
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import Delta, EngineRequest, FinishReason, Timings, Usage
from kvasir.ports.engine import KvSource
from kvasir_workers.engines.embedding import ended, refusal
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.engines.vllm.replica import VllmReplica
from kvasir_workers.engines.vllm.setup.arguments import engine_arguments
from kvasir_workers.engines.vllm.setup.identity import identity_of

_WARM_UP_TOKENS = 256


def embedding_arguments(
    deployment: Deployment,
    pool: PoolSpec,
    *,
    model_path: str,
    platform: str,
    place: NodePlace | None = None,
    classifies: bool = False,
) -> dict[str, Any]:
    """Return keyword arguments of vLLM's AsyncEngineArgs for an embed pool. A generative model embeds by its
    last hidden state, normalized; one that `classifies` answers with the probabilities of its classes."""
    arguments = engine_arguments(deployment, pool, model_path=model_path, platform=platform, place=place)
    arguments |= {"runner": "pooling", "convert": "auto" if classifies else "embed"}
    for name in ("enable_prefix_caching", "enable_chunked_prefill"):
        # Models with bidirectional attention support neither; vLLM detects them.
        arguments[name] = None if arguments[name] else False
    return arguments


class _Input:
    """One input inside the engine."""

    __slots__ = ("collector", "request", "submitted_s")

    def __init__(self, request: EngineRequest, submitted_s: float) -> None:
        self.request = request
        self.submitted_s = submitted_s
        self.collector: Any = None


class VllmEmbeddingEngine(VllmReplica[_Input]):
    """See VllmReplica."""

    _max_tokens = 0
    _classifies = False

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Queue inputs; an input that cannot run is refused by a delta."""
        now = self._clock.now()
        for request in requests:
            why = self._refusal(request)
            if why is not None:
                self._emit(ended(request, FinishReason.ERROR, *why))
                continue
            waiting = self._live[request.request_id] = _Input(request, now)
            self._admissions.append(waiting)
        self._wake.set()

    def release(self, lease_ids: Sequence[str]) -> None:
        """Nothing is ever offered here."""

    @property
    def kv(self) -> KvSource | None:
        """None: the prefix cache is not reported."""
        return None

    # -- inside ------------------------------------------------------------------------------------

    @staticmethod
    def _import_runtime() -> ModuleType:
        from kvasir_workers.engines.vllm.runtime import embedding_runtime

        return embedding_runtime

    def _arguments(self, folder: str, platform: str, epoch: int) -> dict[str, Any]:
        self._classifies = served_classes(self._deployment, Path(self._model_path)) is not None
        return embedding_arguments(
            self._deployment,
            self._pool,
            model_path=folder,
            platform=platform,
            place=self._place,
            classifies=self._classifies,
        )

    def _endless(self) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._pump(), name="vllm-pump")]

    async def _introduce(self, worker_id: str, epoch: int, digest: str) -> WorkerIdentity:
        runtime, llm = self._vllm(), self._llm
        self._max_tokens = llm.model_config.max_model_len
        await runtime.warm_up(llm, min(_WARM_UP_TOKENS, self._max_tokens), classes=self._classifies)
        self._recorder = runtime.recorder(llm)
        self._recorder.reset()
        return await identity_of(
            runtime,
            llm,
            self._deployment,
            self._pool,
            model_path=self._model_path,
            worker_id=worker_id,
            epoch=epoch,
            tokenizer_digest=digest,
            reports_kv=False,
        )

    def _refusal(self, request: EngineRequest) -> tuple[str, str] | None:
        return self._full(request) or refusal(request, adapters=self._adapters, max_tokens=self._max_tokens)

    async def _pump(self) -> None:
        """Pass work to vLLM, in order of arrival: admissions, then aborts."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._admissions or self._aborts:
                if self._admissions:
                    await self._admit(self._admissions.popleft())
                else:
                    await self._stop_one(self._aborts.popleft())

    async def _admit(self, entering: _Input) -> None:
        if entering in self._aborts:
            self._end(entering, FinishReason.ABORT)
        else:
            await self._enter(entering)

    async def _give(self, entering: _Input) -> Any:
        request = entering.request
        lora = self._adapters.get(request.adapter) if request.adapter else None
        return await self._vllm().add(self._llm, request, lora, classes=self._classifies)

    def _fail(self, ending: _Input, code: str, message: str) -> None:
        self._end(ending, FinishReason.ERROR, code, message)

    async def _stop_one(self, ending: _Input) -> None:
        if self._live.get(ending.request.request_id) is not ending:
            return
        # Before the abort in vLLM, which answers with an empty vector.
        self._end(ending, FinishReason.ABORT)
        await self._llm.abort(ending.collector.request_id, internal=True)

    def _deliver(self, done: _Input, output: Any) -> None:
        """Called by vLLM's output handler, once per input."""
        if self._live.get(done.request.request_id) is not done:
            return
        if isinstance(output, Exception):
            self._broken(done, output)
            return
        request = done.request
        del self._live[request.request_id]
        self._emit(
            Delta(
                request_id=request.request_id,
                offset=0,
                finish=FinishReason.STOP,
                last=True,
                usage=Usage(
                    prompt_tokens=len(request.tokens), cached_tokens=max(0, output.num_cached_tokens or 0)
                ),
                timings=Timings(prefill_s=self._clock.now() - done.submitted_s),
                embedding=self._vllm().vector(output),
            )
        )

    def _end(
        self, ending: _Input, finish: FinishReason, code: str | None = None, message: str | None = None
    ) -> None:
        if self._live.pop(ending.request.request_id, None) is not None:
            self._emit(ended(ending.request, finish, code, message))
