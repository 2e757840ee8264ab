"""The common part of the engines on vLLM: start, supervision and end, and delivery of deltas.

vLLM gives every request a collector and expects a task that waits on it: with 64 streams, 64 wake-ups per
step. Here the collectors' `put` appends to one list that is delivered once per iteration of the event loop,
so that an engine step stays one batch from vLLM's output handler to the wire.

An engine owns its process: it sets environment variables before it imports vLLM. The engine core and the
ranks run in child processes that end with it.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from kvasir.clock import MonotonicClock
from kvasir.collector import gc_paused
from kvasir.config.load.model_files import configured_template, resolve_model, tokenizer_digest
from kvasir.config.load.parallel_support import missing_kernels
from kvasir.config.load.support import unsupported_features
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.errors import ConfigError, RequestError
from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import Delta, EngineLoad, EngineRequest, StepBatch
from kvasir.ports.engine import StepSink
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.engines.vllm.caches.compiled import compile_cache, installed_platform
from kvasir_workers.engines.vllm.caches.node_copy import node_copy
from kvasir_workers.engines.vllm.setup.arguments import environment, log_level
from kvasir_workers.engines.vllm.setup.engine_errors import START_ERRORS, EngineErrors
from kvasir_workers.engines.vllm.setup.movement import with_chosen_transfer
from kvasir_workers.engines.vllm.setup.quantize import quantized_folder
from kvasir_workers.engines.vllm.setup.rendezvous import rendezvous_variables

if TYPE_CHECKING:
    from kvasir_workers.engines.vllm.setup.load import LoadRecorder


class Entered(Protocol):
    """A request inside the engine, with vLLM's `collector` of its output once it has one."""

    request: EngineRequest
    collector: Any


EnteredT = TypeVar("EnteredT", bound=Entered)

CACHE_FOLDER = Path.home() / ".cache" / "kvasir"


async def set_environment(
    deployment: Deployment, pool: PoolSpec, place: NodePlace | None, errors: EngineErrors
) -> None:
    """Set the variables of an engine of `pool` in this process. vLLM reads part of them at import. Raise
    ConfigError if the nodes of the engine could not keep others out."""
    signing = rendezvous_variables(pool, place, os.environ)
    kept = await asyncio.to_thread(compile_cache, deployment, pool, CACHE_FOLDER / "compiled")
    os.environ.update(
        environment(
            deployment,
            pool,
            cpus=len(os.sched_getaffinity(0)),
            platform=installed_platform(),
            place=place,
        )
        | errors.variables
        | kept
        | signing
    )


def served_weights(deployment: Deployment, model_path: Path, cache_folder: Path) -> Path:
    """Return the folder that vLLM loads: the model's own, or a copy of it on the node or with quantized
    weights, which may have to be created. Raise ConfigError if it cannot be."""
    load = deployment.model.load
    if load.node_cache is not None:
        model_path = node_copy(model_path, Path(load.node_cache), load.threads)
    if deployment.model.quantization == "int8":
        return quantized_folder(model_path, cache_folder / "int8")
    return model_path


def with_draft(pool: PoolSpec) -> PoolSpec:
    """Return `pool` with its draft model as the folder to load, which may have to be downloaded. Raise
    ConfigError if it is not found."""
    spec = pool.engine.speculative
    if spec is None or spec.model is None:
        return pool
    field = f"pools.{pool.name}.engine.speculative.model"
    folder = resolve_model(spec.model, spec.revision, field=field)
    resolved = spec.model_copy(update={"model": str(folder)})
    return pool.model_copy(update={"engine": pool.engine.model_copy(update={"speculative": resolved})})


class VllmReplica(ABC, Generic[EnteredT]):
    """One replica of `pool`, loaded from the folder `model_path`.

    `place` is the first node's, for an engine that has several: the ranks of the others have to be started
    separately (follower.py). `cache_folder` keeps quantized copies of models. `max_live` bounds the requests
    held at once; more are refused with `no_capacity`.
    """

    def __init__(
        self,
        deployment: Deployment,
        pool: PoolSpec,
        *,
        model_path: str,
        place: NodePlace | None = None,
        cache_folder: Path | None = None,
        max_live: int = 16_384,
    ) -> None:
        self._deployment = deployment
        self._pool = pool
        self._model_path = Path(model_path)
        self._place = place
        self._cache_folder = cache_folder or CACHE_FOLDER
        self._max_live = max_live
        self._clock = MonotonicClock()
        self._live: dict[str, EnteredT] = {}
        self._admissions: deque[EnteredT] = deque()
        self._aborts: deque[EnteredT] = deque()
        self._deltas: list[Delta] = []
        self._flush_due = False
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._llm: Any = None
        self._runtime: ModuleType | None = None
        self._recorder: LoadRecorder | None = None
        self._adapters: dict[str, Any] = {}
        self._adapter_number = 0
        self._sink: StepSink | None = None
        self._failed: asyncio.Future[str] | None = None
        self._errors: EngineErrors | None = None
        self._kv_blocks = 0

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        """Load the model and warm up. Raise ConfigError with the reason and the remedy; for an error of vLLM,
        it is an EngineStartError."""
        self._failed = asyncio.get_running_loop().create_future()
        self._deployment = with_chosen_transfer(self._deployment)
        self._errors = errors = EngineErrors(log_level(self._deployment))
        await set_environment(self._deployment, self._pool, self._place, errors)
        # A seventh of the import's CPU time otherwise goes to collections that find nothing.
        with gc_paused():
            self._runtime = runtime = await asyncio.to_thread(self._import_runtime)
        platform = runtime.platform()
        reasons = unsupported_features(self._deployment, platform=platform)
        if reasons := reasons + missing_kernels((self._pool,)):
            raise ConfigError("\n".join(reasons))
        try:
            template = configured_template(self._deployment.model.chat_template)
            digest = tokenizer_digest(self._model_path, template)
            self._pool = await asyncio.to_thread(with_draft, self._pool)
            folder = await asyncio.to_thread(
                served_weights, self._deployment, self._model_path, self._cache_folder
            )
            arguments = self._arguments(str(folder), platform, epoch)
            self._llm = await asyncio.to_thread(self._build, arguments)
            await self._load_adapters()
            identity = await self._introduce(worker_id, epoch, digest)
        except (*START_ERRORS, runtime.DEAD) as error:
            reason = errors.start_error(error, self._pool.name, f"pool {self._pool.name}")
            await self.stop()
            raise reason from error
        self._sink = sink
        endless = self._endless()
        self._tasks = [*endless, asyncio.create_task(self._watch(endless), name="vllm-watch")]
        return identity

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these requests; each live one ends with finish=ABORT."""
        for request_id in request_ids:
            entered = self._live.get(request_id)
            if entered is not None:
                self._aborts.append(entered)
        self._wake.set()

    async def add_adapter(self, key: str, folder: Path) -> None:
        """See AdapterEngine. vLLM reads the files between two steps of the engine."""
        self._adapter_number += 1
        adapter = self._vllm().lora_request(key, self._adapter_number, str(folder))
        try:
            await self._llm.add_lora(adapter)
        except Exception as error:  # vLLM raises a bare Exception for an error of its core
            raise RequestError(
                f"The engine refuses the adapter: {error}", code="adapter_refused", param="lora_path"
            ) from error
        self._adapters[key] = adapter

    async def remove_adapter(self, key: str) -> None:
        """See AdapterEngine."""
        adapter = self._adapters.pop(key, None)
        if adapter is not None:
            await self._llm.remove_lora(adapter.lora_int_id)

    def adapter_legs(self, key: str) -> int:
        """See AdapterEngine."""
        return sum(entered.request.adapter == key for entered in self._live.values())

    def load(self) -> EngineLoad:
        """Return the load after the latest step."""
        if self._recorder is None:
            return EngineLoad()
        return self._recorder.newest(kv_blocks_total=self._kv_blocks, idle=not self._live)

    async def wait_failed(self) -> str:
        """Wait for the engine's failure and return its reason."""
        if self._failed is None:
            raise RuntimeError("the engine has not been started")
        return await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """Abort running requests and end the child processes. Idempotent."""
        await self._end_tasks()
        await self._shut_down()
        if self._errors is not None:
            self._errors.close()

    # -- each engine's own ---------------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def _import_runtime() -> ModuleType:
        """Import the module that touches vLLM, once vLLM's environment is set."""

    @abstractmethod
    def _arguments(self, folder: str, platform: str, epoch: int) -> dict[str, Any]:
        """Return vLLM's arguments, with the weights in `folder`."""

    def _build(self, arguments: dict[str, Any]) -> Any:
        """Return vLLM's engine once it has loaded the model. Raise as the runtime's `build`."""
        return self._vllm().build(arguments)

    @abstractmethod
    async def _introduce(self, worker_id: str, epoch: int, digest: str) -> WorkerIdentity:
        """Warm up, and return the identity. Raise ValueError, RuntimeError, OSError or vLLM's DEAD."""

    @abstractmethod
    def _endless(self) -> list[asyncio.Task[None]]:
        """Start the tasks that run until the end."""

    @abstractmethod
    async def _give(self, entered: EnteredT) -> Any:
        """Pass it to vLLM and return vLLM's collector. Raise one of its REFUSED or DEAD."""

    @abstractmethod
    def _deliver(self, entered: EnteredT, output: Any) -> None:
        """Handle an output, or an exception, of vLLM's output handler."""

    @abstractmethod
    def _fail(self, entered: EnteredT, code: str, message: str) -> None:
        """End it with an error, if it has not ended."""

    # -- inside --------------------------------------------------------------------------------------

    async def _load_adapters(self) -> None:
        """Also makes the child processes end with this one."""
        await self._llm.collective_rpc("kvasir_leave_with", args=(os.getpid(),))
        await self._llm.collective_rpc("kvasir_serve_prompt_rows")
        lora = self._deployment.lora
        self._adapters = self._vllm().lora_requests({each.name: each.path for each in lora})
        self._adapter_number = len(self._adapters)
        for adapter in self._adapters.values():
            await self._llm.add_lora(adapter)

    def _full(self, request: EngineRequest) -> tuple[str, str] | None:
        """Return the code and the message if `request` must be refused regardless of its parameters."""
        if self._failed is not None and self._failed.done():
            return "engine_dead", self._failed.result()
        if request.request_id in self._live:
            return "duplicate_request", f"request {request.request_id} is still running on this worker"
        if len(self._live) >= self._max_live:
            return "no_capacity", f"the worker has {len(self._live)} requests already"
        return None

    async def _enter(self, entered: EnteredT) -> None:
        """Pass it to vLLM, with its output delivered here."""
        runtime = self._vllm()
        try:
            collector = await self._give(entered)
        except runtime.DEAD as error:
            self._fail(entered, "engine_dead", str(error))
            return
        except runtime.REFUSED as error:
            self._fail(entered, "invalid_request", str(error))
            return
        except Exception as error:  # noqa: BLE001  # what vLLM trips over in one request must not end others
            self._fail(entered, "worker_failed", f"{type(error).__name__}: {error}")
            return
        entered.collector = collector
        early = collector.output
        # vLLM calls `put` for every output of this request and never reads the collector again.
        collector.put = partial(self._deliver, entered)
        if early is not None:
            self._deliver(entered, early)

    def _broken(self, entered: EnteredT, error: Exception) -> None:
        """Handle an exception of vLLM in place of output."""
        code = "engine_dead" if isinstance(error, self._vllm().DEAD) else "worker_failed"
        self._fail(entered, code, f"{type(error).__name__}: {error}")

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

    async def _watch(self, endless: list[asyncio.Task[None]]) -> None:
        """Fail when a task ends: vLLM's output handler ends only with the engine core, and our own tasks
        never end."""
        handler = self._llm.output_handler
        ended, _ = await asyncio.wait([handler, *endless], return_when=asyncio.FIRST_COMPLETED)
        cause = next((task.exception() for task in endless if task in ended), self._llm.dead_error)
        reason = f"vLLM's engine core ended: {cause if self._errors is None else self._errors.why(cause)}"
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(reason)
        for entered in list(self._live.values()):
            self._fail(entered, "engine_dead", reason)

    async def _end_tasks(self) -> None:
        self._sink = None
        self._live.clear()
        self._deltas.clear()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _shut_down(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            await self._vllm().shut_down(llm)

    def _vllm(self) -> Any:
        if self._runtime is None:
            raise RuntimeError("the engine has not been started")
        return self._runtime
