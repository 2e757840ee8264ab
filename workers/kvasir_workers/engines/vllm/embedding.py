"""vLLM's pooling runner behind the engine port: inputs in, one vector each out.

A class of its own beside the one that generates: nothing here is handed over, kept, continued, reported or
streamed. vLLM batches what waits by itself, at every step, so that no window of our own is needed: what
arrives while a batch is computed is the next one.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvasir.clock import MonotonicClock
from kvasir.config.model_files import tokenizer_digest
from kvasir.config.spec import Deployment, PoolSpec
from kvasir.config.support import refusals
from kvasir.core.errors import ConfigError
from kvasir.core.identity import NO_KV, WorkerIdentity
from kvasir.core.requests import Delta, EngineLoad, EngineRequest, FinishReason, StepBatch, Timings, Usage
from kvasir.ports.engine import KvSource, StepSink
from kvasir_workers.engines.embedding import ended, refusal
from kvasir_workers.engines.vllm.arguments import engine_arguments, environment, ranks
from kvasir_workers.engines.vllm.hardware import hardware_of
from kvasir_workers.engines.vllm.quantize import quantized_folder

if TYPE_CHECKING:
    from kvasir_workers.engines.vllm.load import LoadRecorder

_WARM_UP_TOKENS = 256


def embedding_arguments(
    deployment: Deployment, pool: PoolSpec, *, model_path: str, platform: str
) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs for a pool of role embed. A model that was trained to
    generate is made to embed: by its last hidden state, normalized."""
    arguments = engine_arguments(deployment, pool, model_path=model_path, platform=platform)
    arguments |= {"runner": "pooling", "convert": "embed"}
    for name in ("enable_prefix_caching", "enable_chunked_prefill"):
        # Models that look both ways can do neither; vLLM knows which they are.
        arguments[name] = None if arguments[name] else False
    return arguments


class _Input:
    """One input inside the engine."""

    __slots__ = ("collector", "request", "submitted_s")

    def __init__(self, request: EngineRequest, submitted_s: float) -> None:
        self.request = request
        self.submitted_s = submitted_s
        self.collector: Any = None


class VllmEmbeddingEngine:
    """One replica of `pool`, loaded from the folder `model_path`. See VllmEngine."""

    def __init__(
        self,
        deployment: Deployment,
        pool: PoolSpec,
        *,
        model_path: str,
        cache_folder: Path | None = None,
        max_live: int = 16_384,
    ) -> None:
        self._deployment = deployment
        self._pool = pool
        self._model_path = Path(model_path)
        self._cache_folder = cache_folder or Path.home() / ".cache" / "kvasir"
        self._max_live = max_live
        self._clock = MonotonicClock()
        self._live: dict[str, _Input] = {}
        self._admissions: deque[_Input] = deque()
        self._aborts: deque[_Input] = deque()
        self._deltas: list[Delta] = []
        self._flush_due = False
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._llm: Any = None
        self._runtime: ModuleType | None = None
        self._recorder: LoadRecorder | None = None
        self._adapters: dict[str, Any] = {}
        self._max_tokens = 0
        self._sink: StepSink | None = None
        self._failed: asyncio.Future[str] | None = None

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        """Load the model and warm up. Raises ConfigError with the reason and the remedy."""
        self._failed = asyncio.get_running_loop().create_future()
        # vLLM reads part of its environment at import, and which platform it runs on is known after.
        cpus = len(os.sched_getaffinity(0))
        os.environ.update(environment(self._deployment, self._pool, cpus=cpus, platform="cpu"))
        self._runtime = runtime = await asyncio.to_thread(_import_runtime)
        platform = runtime.platform()
        if reasons := refusals(self._deployment, platform=platform):
            raise ConfigError("\n".join(reasons))
        try:
            digest = tokenizer_digest(self._model_path)
            folder = await asyncio.to_thread(self._weights)
            arguments = embedding_arguments(
                self._deployment, self._pool, model_path=str(folder), platform=platform
            )
            self._llm = await asyncio.to_thread(runtime.build, arguments)
            identity = await self._introduce(worker_id, epoch, digest)
        except (ValueError, RuntimeError, OSError, runtime.DEAD) as error:
            await self.stop()
            raise ConfigError(
                f"vLLM did not start pool {self._pool.name} with {self._model_path}: {error}"
            ) from error
        self._sink = sink
        pump = asyncio.create_task(self._pump(), name="vllm-pump")
        self._tasks = [pump, asyncio.create_task(self._watch(pump), name="vllm-watch")]
        return identity

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Queue inputs; what cannot run is refused by a delta."""
        now = self._clock.now()
        for request in requests:
            why = self._refusal(request)
            if why is not None:
                self._emit(ended(request, FinishReason.ERROR, *why))
                continue
            waiting = self._live[request.request_id] = _Input(request, now)
            self._admissions.append(waiting)
        self._wake.set()

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these; each live one ends with finish=ABORT."""
        for request_id in request_ids:
            ending = self._live.get(request_id)
            if ending is not None:
                self._aborts.append(ending)
        self._wake.set()

    def release(self, lease_ids: Sequence[str]) -> None:
        """Nothing is ever offered here."""

    @property
    def kv(self) -> KvSource | None:
        """None: what is cached is the engine's own affair."""
        return None

    def load(self) -> EngineLoad:
        """The load after the newest step."""
        if self._recorder is None:
            return EngineLoad()
        return self._recorder.newest(kv_blocks_total=0, idle=not self._live)

    async def wait_failed(self) -> str:
        """Return why the engine died, when it does."""
        if self._failed is None:
            raise RuntimeError("the engine has not been started")
        return await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """Abort what is left, end the processes below. Idempotent."""
        self._sink = None
        self._live.clear()
        self._deltas.clear()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        llm, self._llm = self._llm, None
        if llm is not None:
            await self._vllm().shut_down(llm)

    # -- inside ------------------------------------------------------------------------------------

    def _weights(self) -> Path:
        if self._deployment.model.quantization == "int8":
            return quantized_folder(self._model_path, self._cache_folder / "int8")
        return self._model_path

    async def _introduce(self, worker_id: str, epoch: int, digest: str) -> WorkerIdentity:
        runtime, llm, model, pool = self._vllm(), self._llm, self._deployment.model, self._pool
        await llm.collective_rpc("kvasir_leave_with", args=(os.getpid(),))
        lora = self._deployment.lora
        self._adapters = runtime.lora_requests({each.name: each.path for each in lora})
        for adapter in self._adapters.values():
            await llm.add_lora(adapter)
        self._max_tokens = llm.model_config.max_model_len
        await runtime.warm_up(llm, min(_WARM_UP_TOKENS, self._max_tokens))
        self._recorder = runtime.recorder(llm)
        self._recorder.reset()
        shares = await llm.collective_rpc("kvasir_model")
        copies = pool.engine.data_parallel_size
        return WorkerIdentity(
            worker_id=worker_id,
            epoch=epoch,
            pool=pool.name,
            role=pool.role,
            model=model.name,
            revision=model.revision,
            tokenizer_digest=digest,
            max_model_len=self._max_tokens,
            kv=NO_KV,
            kv_blocks=0,
            engine="vllm",
            engine_version=runtime.engine_version(),
            adapters=tuple(each.name for each in lora),
            data_parallel_size=copies,
            hardware=hardware_of(
                shares[0]["device"], devices=ranks(pool), element_bytes=shares[0]["element_bytes"]
            ),
            model_parameters=copies * sum(share["parameters"] for share in shares),
            model_bytes=copies * sum(share["bytes"] for share in shares),
            golden=await asyncio.to_thread(runtime.golden, llm, model.name),
        )

    def _refusal(self, request: EngineRequest) -> tuple[str, str] | None:
        if self._failed is not None and self._failed.done():
            return "engine_dead", self._failed.result()
        if request.request_id in self._live:
            return "duplicate_request", f"request {request.request_id} is still running on this worker"
        if len(self._live) >= self._max_live:
            return "no_capacity", f"the worker holds {len(self._live)} requests already"
        return refusal(request, adapters=self._adapters, max_tokens=self._max_tokens)

    async def _pump(self) -> None:
        """Feed vLLM, in the order of arrival: admissions, then aborts."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._admissions or self._aborts:
                if self._admissions:
                    await self._admit(self._admissions.popleft())
                else:
                    await self._stop_one(self._aborts.popleft())

    async def _admit(self, entering: _Input) -> None:
        runtime, request = self._vllm(), entering.request
        if entering in self._aborts:
            self._end(entering, FinishReason.ABORT)
            return
        lora = self._adapters.get(request.adapter) if request.adapter else None
        try:
            collector = await runtime.add(self._llm, request, lora)
        except runtime.DEAD as error:
            self._end(entering, FinishReason.ERROR, "engine_dead", str(error))
            return
        except runtime.REFUSED as error:
            self._end(entering, FinishReason.ERROR, "invalid_request", str(error))
            return
        except Exception as error:  # noqa: BLE001  # what vLLM trips over in one input must not end others
            self._end(entering, FinishReason.ERROR, "worker_failed", f"{type(error).__name__}: {error}")
            return
        entering.collector = collector
        early = collector.output
        # vLLM calls `put` for the output of this input and never looks at the collector again.
        collector.put = partial(self._deliver, entering)
        if early is not None:
            self._deliver(entering, early)

    async def _stop_one(self, ending: _Input) -> None:
        if self._live.get(ending.request.request_id) is not ending:
            return
        # Before vLLM is told, which answers with an empty vector.
        self._end(ending, FinishReason.ABORT)
        await self._llm.abort(ending.collector.request_id, internal=True)

    def _deliver(self, done: _Input, output: Any) -> None:
        """Runs inside vLLM's output handler, once per input."""
        if self._live.get(done.request.request_id) is not done:
            return
        if isinstance(output, Exception):
            code = "engine_dead" if isinstance(output, self._vllm().DEAD) else "worker_failed"
            self._end(done, FinishReason.ERROR, code, f"{type(output).__name__}: {output}")
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

    def _emit(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._sink is not None and self._deltas:
            deltas, self._deltas = tuple(self._deltas), []
            self._sink(StepBatch(deltas, self.load()))

    async def _watch(self, pump: asyncio.Task[None]) -> None:
        """vLLM's output handler ends only when the engine core is gone, and our own task never."""
        gone, _ = await asyncio.wait([self._llm.output_handler, pump], return_when=asyncio.FIRST_COMPLETED)
        cause = pump.exception() if pump in gone else self._llm.dead_error
        reason = f"vLLM's engine core ended: {cause}"
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(reason)
        for lost in list(self._live.values()):
            self._end(lost, FinishReason.ERROR, "engine_dead", reason)

    def _vllm(self) -> Any:
        if self._runtime is None:
            raise RuntimeError("the engine has not been started")
        return self._runtime


def _import_runtime() -> ModuleType:
    from kvasir_workers.engines.vllm import embedding_runtime  # only once its environment is set

    return embedding_runtime
