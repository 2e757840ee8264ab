"""An engine that computes nothing and answers at the bench's pacing, so that only the router is measured.

It implements the engine port in full and reports what its prefix cache would hold: each prompt's blocks are
reported once, with the step of its first token, and later prompts get the number of their cached tokens.
"""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvasir.core.identity import Hardware, KvLayout, WorkerIdentity
from kvasir.core.kv import KvBatch, KvEventKind, KvSnapshotPart, Medium
from kvasir.core.requests import (
    Delta,
    EngineLoad,
    EngineRequest,
    FinishReason,
    KvHandoff,
    Leg,
    Role,
    StepBatch,
    Timings,
    Usage,
)
from kvasir.native import chain_hashes, root_hash
from kvasir.ports.engine import KvSink, StepSink
from load_tests.scenarios.gateway.pacing import AT_ONCE, SHORT, SHORT_STEP_S, TOKEN, TOKENS_PER_S, Ticker

_RECORD = struct.Struct("<BBHIQ")
_FLUSH_BYTES = 32 << 10
_PREFILL_S = 0.001


class ScriptedCache:
    """`kvasir.ports.engine.KvSource` of a cache without eviction."""

    def __init__(self) -> None:
        self._epoch = 0
        self._sequence = 0
        self._sink: KvSink | None = None
        self._log = bytearray()
        self._held: set[int] = set()

    @property
    def incomplete(self) -> str | None:
        """See KvSource."""
        return None

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the log that were not delivered yet."""
        return len(self._log)

    def begin(self, epoch: int) -> None:
        """Number batches from 1 in `epoch`."""
        self._epoch = epoch

    def subscribe(self, sink: KvSink | None) -> None:
        """See KvSource."""
        self._sink = sink

    def flush(self) -> None:
        """See KvSource."""
        if self._log:
            self._sequence += 1
            log, self._log = bytes(self._log), bytearray()
            if self._sink is not None:
                self._sink(KvBatch(self._epoch, self._sequence, log))

    async def snapshot(self) -> AsyncGenerator[KvSnapshotPart, None]:
        """See KvSource. Called only while the cache is empty."""
        yield KvSnapshotPart(self._epoch, self._sequence, b"", last=True)

    def report(self, parent: int, names: array[int]) -> None:
        """Record that these blocks follow `parent`, 0 for none."""
        self._log += _RECORD.pack(KvEventKind.STORED, Medium.DEVICE, 0, len(names), parent)
        self._log += names.tobytes()

    def cached(self, names: array[int]) -> int:
        """Return how many leading blocks are cached; afterwards all are cached and reported."""
        held = next((at for at, name in enumerate(names) if name not in self._held), len(names))
        if held < len(names):
            self.report(names[held - 1] if held else 0, names[held:])
            self._held.update(names[held:])
        return held


@dataclass(slots=True)
class _Stream:
    request: EngineRequest
    tokens: int
    cached: int = 0
    done: int = 0


@dataclass(slots=True)
class _Group:
    """Streams whose tokens travel in one message."""

    streams: dict[str, _Stream] = field(default_factory=dict)
    ticker: Ticker | None = None

    def __len__(self) -> int:
        return len(self.streams)


class ScriptedEngine:
    """`kvasir.ports.engine.Engine`. Long streams are spread over groups that step independently; the tokens
    of a group are one message. `messages` and `deltas` count what was sent."""

    def __init__(self, model: str, pool: str, role: Role, tokenizer_digest: str, max_model_len: int) -> None:
        self.messages = 0
        self.deltas = 0
        self.cache = ScriptedCache()
        self._model = model
        self._pool = pool
        self._role = role
        self._digest = tokenizer_digest
        self._max_model_len = max_model_len
        self._sink: StepSink | None = None
        self._block_size = 16
        self._live: dict[str, _Group] = {}
        self._short = self._group(SHORT_STEP_S)
        self._long = [self._group(1 / TOKENS_PER_S)]
        self._soon: list[Delta] = []
        self._failed: asyncio.Future[str] | None = None

    async def start(self, sink: StepSink, *, worker_id: str, epoch: int) -> WorkerIdentity:
        """See Engine."""
        self._sink = sink
        self._failed = asyncio.get_running_loop().create_future()
        self.cache.begin(epoch)
        return WorkerIdentity(
            worker_id=worker_id,
            epoch=epoch,
            pool=self._pool,
            role=self._role,
            model=self._model,
            revision="main",
            tokenizer_digest=self._digest,
            max_model_len=self._max_model_len,
            kv=KvLayout(self._block_size, "bfloat16", "scripted", 32, 8, 128, 128 << 10),
            kv_blocks=4_000_000,
            engine="scripted",
            engine_version="1",
            transfer="scripted",
            reports_kv=True,
            hardware=Hardware("scripted", 1, flops=1e18, bytes_per_s=1e15),
            model_parameters=8_000_000_000,
            model_bytes=16_000_000_000,
        )

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """See Engine."""
        for request in requests:
            tokens = 1 if request.leg is Leg.PREFILL else request.sampling.max_tokens or 1
            stream = _Stream(request, tokens)
            root = root_hash(self._model, request.salt, request.adapter or "")
            stream.cached = self.cache.cached(chain_hashes(request.tokens, self._block_size, root))
            if tokens <= AT_ONCE:
                self._later(self._next(stream))
                continue
            group = self._short if tokens <= SHORT else min(self._long, key=len)
            group.streams[request.request_id] = stream
            self._live[request.request_id] = group
            assert group.ticker is not None
            group.ticker.start()

    def abort(self, request_ids: Sequence[str]) -> None:
        """See Engine."""
        for request_id in request_ids:
            group = self._live.pop(request_id, None)
            if group is not None:
                stream = group.streams.pop(request_id)
                self._later(
                    Delta(request_id, stream.done, finish=FinishReason.ABORT, last=True, usage=_usage(stream))
                )

    def release(self, lease_ids: Sequence[str]) -> None:
        """See Engine."""

    @property
    def kv(self) -> ScriptedCache:
        """See Engine."""
        return self.cache

    def load(self) -> EngineLoad:
        """See Engine."""
        return EngineLoad(running=len(self._live), kv_usage=0.1, kv_blocks_total=4_000_000)

    async def wait_failed(self) -> str:
        """See Engine. It does not fail."""
        assert self._failed is not None
        return await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """See Engine."""
        self._sink = None

    def regroup(self, groups: int) -> None:
        """Spread subsequent long streams over that many groups."""
        period_s = 1 / TOKENS_PER_S
        self._long = [self._group(period_s, at / groups * period_s) for at in range(groups)]

    async def hold(self, blocks: Iterator[tuple[int, array[int]]]) -> int:
        """Report chains of (parent, names) at the rate that a router accepts; return the number of blocks."""
        count = 0
        for parent, names in blocks:
            self.cache.report(parent, names)
            count += len(names)
            if self.cache.waiting_bytes >= _FLUSH_BYTES:
                self.cache.flush()
                await asyncio.sleep(0.002)
        self.cache.flush()
        return count

    def _group(self, period_s: float, phase_s: float = 0.0) -> _Group:
        group = _Group()
        group.ticker = Ticker(partial(self._step, group), period_s, phase_s)
        return group

    def _step(self, group: _Group) -> bool:
        deltas = [self._next(stream) for stream in group.streams.values()]
        for delta in deltas:
            if delta.last:
                del group.streams[delta.request_id]
                del self._live[delta.request_id]
        self._deliver(deltas)
        return bool(group.streams)

    def _next(self, stream: _Stream) -> Delta:
        at, stream.done = stream.done, stream.done + 1
        request = stream.request
        if stream.done < stream.tokens:
            return Delta(request.request_id, at, (100,), TOKEN)
        handoff = None
        if request.leg is Leg.PREFILL:
            blocks = len(request.tokens) // self._block_size
            handoff = KvHandoff(f"lease-{request.request_id}", 1, 60.0, blocks, b"scripted")
        return Delta(
            request.request_id,
            at,
            (100,),
            TOKEN,
            finish=FinishReason.LENGTH,
            last=True,
            usage=_usage(stream),
            timings=Timings(prefill_s=_PREFILL_S, decode_s=stream.done * 0.001),
            handoff=handoff,
        )

    def _later(self, delta: Delta) -> None:
        if not self._soon:
            asyncio.get_running_loop().call_soon(self._deliver_soon)
        self._soon.append(delta)

    def _deliver_soon(self) -> None:
        soon, self._soon = self._soon, []
        self._deliver(soon)

    def _deliver(self, deltas: list[Delta]) -> None:
        if not deltas or self._sink is None:
            return
        self.messages += 1
        self.deltas += len(deltas)
        self.cache.flush()
        self._sink(StepBatch(tuple(deltas), self.load()))


def _usage(stream: _Stream) -> Usage:
    return Usage(
        prompt_tokens=len(stream.request.tokens),
        cached_tokens=min(stream.cached * 16, len(stream.request.tokens) - 1),
        output_tokens=stream.done,
    )
