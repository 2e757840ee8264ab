"""vLLM's asynchronous engine behind the engine port: legs in, deltas out.

Beside the common functions of a replica, legs of this engine may need preparation, offer and pull KV, and
continue the output of other workers; and its prefix cache is reported, which requires an exact record first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kvasir.checkpoint.media.rules import MediaRules, media_rules
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.config.spec.media.served import MediaInputs
from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import Delta, EngineRequest
from kvasir.ports.engine import KvSource
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.engines.vllm.events.cache_record import CacheRecord
from kvasir_workers.engines.vllm.events.kv_recovery import CacheControl
from kvasir_workers.engines.vllm.events.tier_watch import watch_tiers
from kvasir_workers.engines.vllm.output.preparing_queue import Preparing
from kvasir_workers.engines.vllm.output.stream import LegStream
from kvasir_workers.engines.vllm.replica import VllmReplica
from kvasir_workers.engines.vllm.setup.arguments import engine_arguments
from kvasir_workers.engines.vllm.setup.identity import identity_of
from kvasir_workers.engines.vllm.setup.movement import movement_of
from kvasir_workers.engines.vllm.setup.refusals import invalid

_WARM_UP_PROMPT_TOKENS = 256
_WARM_UP_OUTPUT_TOKENS = 4
_EVENTS_S = 30.0


class VllmEngine(VllmReplica[LegStream]):
    """See VllmReplica."""

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
        super().__init__(
            deployment,
            pool,
            model_path=model_path,
            place=place,
            cache_folder=cache_folder,
            max_live=max_live,
        )
        self._leases: dict[str, None] = {}
        self._leases_due = asyncio.Event()
        self._preparing = Preparing(self._ready, self._fail)
        self._record: CacheRecord | None = None
        self._media = MediaInputs(MediaRules(), deployment.gateway)
        if pool.engine.kv_events and pool.engine.prefix_caching:
            self._record = CacheRecord(deployment, pool, self._clock)
        self._held = False
        self._epoch = 0
        self._legs_seen = 0

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Queue legs; a leg that cannot run is refused by a delta."""
        fails_without_kv = self._deployment.transfer.on_failure == "fail"
        for request in requests:
            stream = LegStream(request, fails_without_kv=fails_without_kv)
            refusal = self._refusal(request)
            if refusal is not None:
                self._emit(stream.fail(*refusal))
                continue
            self._live[request.request_id] = stream
            if stream.wants_preparing:
                self._preparing.begin(stream)
            else:
                self._ready(stream)

    def release(self, lease_ids: Sequence[str]) -> None:
        """Free the KV offered under these leases."""
        if self._deployment.disaggregated:
            self._leases.update(dict.fromkeys(lease_ids))
            self._leases_due.set()

    @property
    def kv(self) -> KvSource | None:
        """Return the record of the prefix cache; None if there is no cache, or the spec disables reports."""
        return None if self._record is None else self._record.holdings

    async def stop(self) -> None:
        """Abort running legs and end the child processes. Idempotent."""
        await self._end_tasks()
        await self._preparing.stop()
        await self._shut_down()
        if self._record is not None:
            self._record.close()

    # -- inside ------------------------------------------------------------------------------------

    @staticmethod
    def _import_runtime() -> ModuleType:
        from kvasir_workers.engines.vllm.runtime import engine_runtime as runtime

        return runtime

    def _arguments(self, folder: str, platform: str, epoch: int) -> dict[str, Any]:
        self._epoch = epoch
        self._media = MediaInputs(media_rules(self._model_path), self._deployment.gateway)
        media = self._media.rules.placeholders
        events = None if self._record is None else self._record.open(epoch, media=bool(media))
        return engine_arguments(
            self._deployment,
            self._pool,
            model_path=folder,
            platform=platform,
            movement=movement_of(self._deployment, self._model_path),
            events=events,
            place=self._place,
            media=media,
        )

    def _build(self, arguments: dict[str, Any]) -> Any:
        return self._vllm().build(arguments, self._pool.engine)

    def _endless(self) -> list[asyncio.Task[None]]:
        control = self._control()
        endless = [
            asyncio.create_task(self._pump(), name="vllm-pump"),
            asyncio.create_task(self._release(), name="vllm-leases"),
        ]
        if self._record is not None:
            keeping = self._record.keep_exact(control)
            endless.append(asyncio.create_task(keeping, name="vllm-record"))
        if self._deployment.tiers.configured:
            watching = watch_tiers(self.load, control, self._clock)
            endless.append(asyncio.create_task(watching, name="vllm-tiers"))
        return endless

    async def _introduce(self, worker_id: str, epoch: int, digest: str) -> WorkerIdentity:
        runtime, llm, deployment, pool = self._vllm(), self._llm, self._deployment, self._pool
        self._preparing.start(runtime.preparer(llm, pool.engine, self._media), runtime.REFUSED)
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
            media=self._media.kinds,
        )

    async def _begin_empty(self) -> None:
        """Empty the cache after the warm-up. Raise RuntimeError if the record does not receive the event."""
        if self._record is None:
            await self._llm.reset_prefix_cache()
            return
        try:
            async with asyncio.timeout(_EVENTS_S):
                await self._record.make_exact(self._control())
        except TimeoutError as error:
            remedy = "set engine.kv_events to false to disable them"
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
        """Return the code and the message of the first rule that `request` breaks."""
        if full := self._full(request):
            return full
        limit, length = self._deployment.model.context_length, len(request.tokens)
        if length >= limit:
            return "context_length_exceeded", f"the prompt has {length} tokens; at most {limit - 1} fit"
        disaggregated = self._deployment.disaggregated
        reasons = self._pool.engine.reasoning_parser is not None
        message = invalid(request, adapters=self._adapters, disaggregated=disaggregated, reasons=reasons)
        return None if message is None else ("invalid_request", message)

    def _ready(self, stream: LegStream) -> None:
        self._admissions.append(stream)
        self._wake.set()

    def _fail(self, stream: LegStream, code: str, message: str) -> None:
        self._end(stream, stream.fail(code, message))

    async def _pump(self) -> None:
        """Pass work to vLLM, in order of arrival: admissions, then aborts."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (self._admissions and not self._held) or self._aborts:
                if self._admissions and not self._held:
                    await self._admit(self._admissions.popleft())
                else:
                    await self._stop_one(self._aborts.popleft())

    async def _release(self) -> None:
        """Release leases. The engine core answers between two steps: a prompt that waited for the answer
        would miss the next step, so this is not part of `_pump`."""
        while True:
            await self._leases_due.wait()
            self._leases_due.clear()
            lease_ids, self._leases = list(self._leases), {}
            with contextlib.suppress(self._vllm().DEAD):
                await self._llm.collective_rpc("kvasir_release_leases", args=(lease_ids,))

    async def _admit(self, stream: LegStream) -> None:
        if stream in self._aborts:
            self._end(stream, stream.abort())
        else:
            await self._enter(stream)

    async def _give(self, stream: LegStream) -> Any:
        runtime, request, prepared = self._vllm(), stream.request, stream.prepared
        self._legs_seen += 1
        stream.lease_id = f"{request.request_id}#{self._legs_seen}"
        return await self._llm.add_request(
            request.request_id,
            runtime.prompt(request) if prepared is None or prepared.prompt is None else prepared.prompt,
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

    async def _stop_one(self, stream: LegStream) -> None:
        if stream.ended:
            return
        if stream.collector is None:
            # It is being prepared, or admissions are held: vLLM does not have it.
            with contextlib.suppress(ValueError):
                self._admissions.remove(stream)
            self._end(stream, stream.abort())
            return
        await self._llm.abort(stream.collector.request_id, internal=True)

    def _deliver(self, stream: LegStream, output: Any) -> None:
        """Called by vLLM's output handler, once per request and step."""
        if stream.ended:
            return
        if isinstance(output, Exception):
            self._broken(stream, output)
            return
        for delta in stream.deltas(output):
            self._emit(delta)
        if stream.ended:
            self._forget(stream)

    def _offered(self, moved: Mapping[str, Any]) -> None:
        """Also called by vLLM's output handler. A hand-off that arrives late is not attributed to another
        leg."""
        request_id, _, _ = str(moved.get("lease_id", "")).rpartition("#")
        stream = self._live.get(request_id)
        delta = None if stream is None else stream.offered(moved)
        if delta is not None:
            self._emit(delta)

    def _end(self, stream: LegStream, delta: Delta) -> None:
        self._forget(stream)
        self._emit(delta)

    def _forget(self, stream: LegStream) -> None:
        self._live.pop(stream.request.request_id, None)

    def _flush(self) -> None:
        if self._record is not None and self._sink is not None and self._deltas:
            self._record.flush()
        super()._flush()
