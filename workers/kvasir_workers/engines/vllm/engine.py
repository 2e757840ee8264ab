"""vLLM's asynchronous engine behind the engine port.

vLLM gives every request a collector and expects a task that waits on it: with 64 streams, 64 wake-ups
per step. Here the collectors' `put` leads into one list that is delivered once per tick of the loop,
so that an engine step stays one batch from vLLM's output handler to the wire.

The adapter owns its process: it sets environment variables before it imports vLLM. The engine core
and the ranks run in processes below it and leave when it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvasir.clock import MonotonicClock
from kvasir.config.model_files import tokenizer_digest
from kvasir.config.spec import Deployment, PoolSpec
from kvasir.config.support import refusals
from kvasir.core.errors import ConfigError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import Delta, EngineLoad, EngineRequest, StepBatch
from kvasir.ports.engine import KvSource, StepSink
from kvasir_workers.engines.vllm.arguments import engine_arguments, environment
from kvasir_workers.engines.vllm.cache_record import CacheRecord
from kvasir_workers.engines.vllm.identity import identity_of
from kvasir_workers.engines.vllm.kv_recovery import CacheControl
from kvasir_workers.engines.vllm.preparing_queue import Preparing
from kvasir_workers.engines.vllm.quantize import quantized_folder
from kvasir_workers.engines.vllm.refusals import invalid
from kvasir_workers.engines.vllm.stream import Stream
from kvasir_workers.engines.vllm.tier_watch import watch_tiers

if TYPE_CHECKING:
    from kvasir_workers.engines.vllm.load import LoadRecorder

_WARM_UP_PROMPT_TOKENS = 256
_WARM_UP_OUTPUT_TOKENS = 4
_EVENTS_S = 30.0


class VllmEngine:
    """One replica of `pool`, loaded from the folder `model_path`.

    `cache_folder` keeps quantized copies of models. `max_live` bounds the legs held at once; more are
    refused with `no_capacity`.
    """

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
        self._live: dict[str, Stream] = {}
        self._admissions: deque[Stream] = deque()
        self._aborts: deque[Stream] = deque()
        self._leases: dict[str, None] = {}
        self._deltas: list[Delta] = []
        self._flush_due = False
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._preparing = Preparing(self._ready, self._unready)
        self._llm: Any = None
        self._runtime: ModuleType | None = None
        self._recorder: LoadRecorder | None = None
        self._adapters: dict[str, Any] = {}
        self._record: CacheRecord | None = None
        if pool.engine.kv_events and pool.engine.prefix_caching:
            self._record = CacheRecord(deployment, pool, MonotonicClock())
        self._held = False
        self._sink: StepSink | None = None
        self._failed: asyncio.Future[str] | None = None
        self._epoch = 0
        self._legs_seen = 0
        self._kv_blocks = 0

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        """Load the model and warm up. Raises ConfigError with the reason and the remedy."""
        self._failed = asyncio.get_running_loop().create_future()
        self._epoch = epoch
        # vLLM reads part of its environment at import, and which platform it runs on is known after.
        variables = partial(environment, self._deployment, self._pool, cpus=len(os.sched_getaffinity(0)))
        os.environ.update(variables(platform="cpu"))
        self._runtime = runtime = await asyncio.to_thread(_import_runtime)
        platform = runtime.platform()
        reasons = refusals(self._deployment, platform=platform)
        if reasons:
            raise ConfigError("\n".join(reasons))
        try:
            digest = tokenizer_digest(self._model_path)
            folder = await asyncio.to_thread(self._weights)
            arguments = engine_arguments(
                self._deployment,
                self._pool,
                model_path=str(folder),
                platform=platform,
                events=None if self._record is None else self._record.open(epoch),
            )
            self._llm = await asyncio.to_thread(runtime.build, arguments)
            identity = await self._introduce(worker_id, epoch, digest)
        except (ValueError, RuntimeError, OSError, runtime.DEAD) as error:
            await self.stop()
            raise ConfigError(
                f"vLLM did not start pool {self._pool.name} with {self._model_path}: {error}"
            ) from error
        self._sink = sink
        control = self._control()
        endless = [asyncio.create_task(self._pump(), name="vllm-pump")]
        if self._record is not None:
            keeping = self._record.keep_exact(control)
            endless.append(asyncio.create_task(keeping, name="vllm-record"))
        if self._deployment.tiers.configured:
            watching = watch_tiers(self.load, control, MonotonicClock())
            endless.append(asyncio.create_task(watching, name="vllm-tiers"))
        self._tasks = [*endless, asyncio.create_task(self._watch(endless), name="vllm-watch")]
        return identity

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Queue legs; what cannot run is refused by a delta."""
        for request in requests:
            stream = Stream(request)
            refusal = self._refusal(request)
            if refusal is not None:
                self._emit(stream.fail(*refusal))
                continue
            self._live[request.request_id] = stream
            if stream.wants_preparing:
                self._preparing.begin(stream)
            else:
                self._ready(stream)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these; each live one ends with finish=ABORT."""
        for request_id in request_ids:
            stream = self._live.get(request_id)
            if stream is not None:
                self._aborts.append(stream)
        self._wake.set()

    def release(self, lease_ids: Sequence[str]) -> None:
        """Free KV that was offered under these leases."""
        if self._deployment.disaggregated:
            self._leases.update(dict.fromkeys(lease_ids))
            self._wake.set()

    @property
    def kv(self) -> KvSource | None:
        """What the prefix cache holds; None where there is none, or the spec wants no reports."""
        return None if self._record is None else self._record.holdings

    def load(self) -> EngineLoad:
        """The load after the newest step."""
        if self._recorder is None:
            return EngineLoad()
        return self._recorder.newest(kv_blocks_total=self._kv_blocks, idle=not self._live)

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
        await self._preparing.stop()
        llm, self._llm = self._llm, None
        if llm is not None:
            await self._vllm().shut_down(llm)
        if self._record is not None:
            self._record.close()

    # -- inside ------------------------------------------------------------------------------------

    def _weights(self) -> Path:
        if self._deployment.model.quantization == "int8":
            return quantized_folder(self._model_path, self._cache_folder / "int8")
        return self._model_path

    async def _introduce(self, worker_id: str, epoch: int, digest: str) -> WorkerIdentity:
        runtime, llm, deployment, pool = self._vllm(), self._llm, self._deployment, self._pool
        self._preparing.start(runtime.preparer(llm, pool.engine), runtime.REFUSED)
        await llm.collective_rpc("kvasir_leave_with", args=(os.getpid(),))
        self._adapters = runtime.lora_requests({each.name: each.path for each in deployment.lora})
        for adapter in self._adapters.values():
            await llm.add_lora(adapter)
        length = min(_WARM_UP_PROMPT_TOKENS, llm.model_config.max_model_len - _WARM_UP_OUTPUT_TOKENS)
        copies = pool.engine.data_parallel_size
        warm_up = [1] * max(1, length)
        await runtime.run_on_each_rank(llm, copies, warm_up, _WARM_UP_OUTPUT_TOKENS, "kvasir-warm-up")
        await self._begin_empty()
        self._recorder = runtime.recorder(llm)
        self._recorder.reset()
        self._recorder.on_early_handoff = self._offered
        self._kv_blocks = llm.vllm_config.cache_config.num_gpu_blocks
        return await identity_of(
            runtime,
            llm,
            deployment,
            pool,
            model_path=self._model_path,
            worker_id=worker_id,
            epoch=epoch,
            tokenizer_digest=digest,
            reports_kv=self._record is not None,
        )

    async def _begin_empty(self) -> None:
        """Forget the warm-up. Raises RuntimeError when the record does not hear of it."""
        if self._record is None:
            await self._llm.reset_prefix_cache()
            return
        try:
            async with asyncio.timeout(_EVENTS_S):
                await self._record.make_exact(self._control())
        except TimeoutError as error:
            remedy = "set engine.kv_events to false to go without them"
            raise RuntimeError(f"its KV events did not arrive in {_EVENTS_S:.0f} s; {remedy}") from error

    def _control(self) -> CacheControl:
        def idle() -> bool:
            return not self._live and self.load().kv_blocks_leased == 0

        def hold(held: bool) -> None:
            self._held = held
            self._wake.set()

        copies = self._pool.engine.data_parallel_size
        control: CacheControl = self._vllm().EngineControl(
            self._llm, copies, tiers=self._deployment.tiers.configured, idle=idle, hold=hold
        )
        return control

    def _refusal(self, request: EngineRequest) -> tuple[str, str] | None:
        """The code and the message of the first rule that `request` breaks."""
        if self._failed is not None and self._failed.done():
            return "engine_dead", self._failed.result()
        if request.request_id in self._live:
            return "duplicate_request", f"request {request.request_id} is still running on this worker"
        if len(self._live) >= self._max_live:
            return "no_capacity", f"the worker holds {len(self._live)} requests already"
        limit, length = self._deployment.model.max_model_len, len(request.tokens)
        if length >= limit:
            return "context_length_exceeded", f"the prompt has {length} tokens; at most {limit - 1} fit"
        disaggregated = self._deployment.disaggregated
        reasons = self._pool.engine.reasoning_parser is not None
        message = invalid(request, adapters=self._adapters, disaggregated=disaggregated, reasons=reasons)
        return None if message is None else ("invalid_request", message)

    def _ready(self, stream: Stream) -> None:
        self._admissions.append(stream)
        self._wake.set()

    def _unready(self, stream: Stream, code: str, message: str) -> None:
        self._end(stream, stream.fail(code, message))

    async def _pump(self) -> None:
        """Feed vLLM, in the order of arrival: admissions, then aborts, then lease releases."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (self._admissions and not self._held) or self._aborts:
                if self._admissions and not self._held:
                    await self._admit(self._admissions.popleft())
                else:
                    await self._stop_one(self._aborts.popleft())
            if self._leases:
                lease_ids, self._leases = list(self._leases), {}
                with contextlib.suppress(self._vllm().DEAD):
                    await self._llm.collective_rpc("kvasir_release_leases", args=(lease_ids,))

    async def _admit(self, stream: Stream) -> None:
        runtime, request = self._vllm(), stream.request
        if stream in self._aborts:
            self._end(stream, stream.abort())
            return
        self._legs_seen += 1
        stream.lease_id = f"{request.request_id}#{self._legs_seen}"
        prepared = stream.prepared
        try:
            collector = await self._llm.add_request(
                request.request_id,
                runtime.prompt(request),
                runtime.sampling_params(
                    request,
                    lease_id=stream.lease_id,
                    fence=self._epoch,
                    lease_s=self._deployment.transfer.lease_s,
                    prepared=prepared,
                ),
                lora_request=self._adapters.get(request.adapter) if request.adapter else None,
                priority=request.priority,
                data_parallel_rank=request.data_parallel_rank,
                **({} if prepared is None else prepared.arguments),
            )
        except runtime.DEAD as error:
            self._end(stream, stream.fail("engine_dead", str(error)))
            return
        except runtime.REFUSED as error:
            self._end(stream, stream.fail("invalid_request", str(error)))
            return
        except Exception as error:  # noqa: BLE001  # what vLLM trips over in one request must not end others
            self._end(stream, stream.fail("worker_failed", f"{type(error).__name__}: {error}"))
            return
        stream.collector = collector
        early = collector.output
        # vLLM calls `put` for every output of this request and never looks at the collector again.
        collector.put = partial(self._deliver, stream)
        if early is not None:
            self._deliver(stream, early)

    async def _stop_one(self, stream: Stream) -> None:
        if stream.ended:
            return
        if stream.collector is None:
            # It is being prepared, or newcomers are held: it need not wait for the engine.
            with contextlib.suppress(ValueError):
                self._admissions.remove(stream)
            self._end(stream, stream.abort())
            return
        await self._llm.abort(stream.collector.request_id, internal=True)

    def _deliver(self, stream: Stream, output: Any) -> None:
        """Runs inside vLLM's output handler, once per request and step."""
        if stream.ended:
            return
        if isinstance(output, Exception):
            code = "engine_dead" if isinstance(output, self._vllm().DEAD) else "worker_failed"
            self._end(stream, stream.fail(code, f"{type(output).__name__}: {output}"))
            return
        for delta in stream.deltas(output):
            self._emit(delta)
        if stream.ended:
            self._forget(stream)

    def _offered(self, moved: Mapping[str, Any]) -> None:
        """Runs inside vLLM's output handler too. What a lost race brings is not taken for another leg's."""
        request_id, _, _ = str(moved.get("lease_id", "")).rpartition("#")
        stream = self._live.get(request_id)
        delta = None if stream is None else stream.offered(moved)
        if delta is not None:
            self._emit(delta)

    def _end(self, stream: Stream, delta: Delta) -> None:
        self._forget(stream)
        self._emit(delta)

    def _forget(self, stream: Stream) -> None:
        self._live.pop(stream.request.request_id, None)

    def _emit(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._sink is None or not self._deltas:
            return
        if self._record is not None:
            self._record.flush()
        deltas, self._deltas = tuple(self._deltas), []
        self._sink(StepBatch(deltas, self.load()))

    async def _watch(self, endless: list[asyncio.Task[None]]) -> None:
        """vLLM's output handler ends only when the engine core is gone, and our own tasks never."""
        handler = self._llm.output_handler
        ended, _ = await asyncio.wait([handler, *endless], return_when=asyncio.FIRST_COMPLETED)
        cause = next((task.exception() for task in endless if task in ended), self._llm.dead_error)
        reason = f"vLLM's engine core ended: {cause}"
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(reason)
        for stream in list(self._live.values()):
            self._end(stream, stream.fail("engine_dead", reason))

    def _vllm(self) -> Any:
        if self._runtime is None:
            raise RuntimeError("the engine has not been started")
        return self._runtime


def _import_runtime() -> ModuleType:
    from kvasir_workers.engines.vllm import runtime  # only once its environment is set

    return runtime
