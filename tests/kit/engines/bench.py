"""An engine under a recorder, with helpers to run legs on it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.kit.engines.preloaded import preload_core
from tests.kit.engines.recorder import DeltaRecorder, Recorded
from tests.kit.suite.started import count_start

from kvasir.core.identity import WorkerIdentity
from kvasir.core.requests import EngineRequest, KvHandoff, Leg, Sampling, token_ids
from kvasir.ports.clock import Rng
from kvasir.ports.engine import Engine
from kvasir_workers.engines.vllm.replica import VllmReplica

_PATIENCE_S = 60.0


@dataclass
class EngineBench:
    """A started engine under a recorder, with helpers to run legs on it."""

    engine: Engine
    identity: WorkerIdentity
    recorder: DeltaRecorder
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def new_id(self) -> str:
        """Return an unused request id."""
        return f"{self.identity.worker_id}-r{next(self._ids)}"

    def request(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        leg: Leg = Leg.FULL,
        handoff: KvHandoff | None = None,
        salt: str = "",
    ) -> EngineRequest:
        """A leg with its own request id."""
        return EngineRequest(self.new_id(), token_ids(tokens), sampling, leg=leg, handoff=handoff, salt=salt)

    async def ended(self, request_id: str) -> Recorded:
        """Return the whole request once it has ended. Raise TimeoutError."""
        async with asyncio.timeout(_PATIENCE_S):
            return await self.recorder.wait(request_id)

    async def run(self, *requests: EngineRequest) -> list[Recorded]:
        """Submit all at once and wait for all of them."""
        self.engine.submit(requests)
        return [await self.ended(request.request_id) for request in requests]

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        leg: Leg = Leg.FULL,
        handoff: KvHandoff | None = None,
        salt: str = "",
    ) -> Recorded:
        """Run one leg to its end."""
        (recorded,) = await self.run(self.request(tokens, sampling, leg=leg, handoff=handoff, salt=salt))
        return recorded

    async def first_delta(self, request_id: str) -> Recorded:
        """Return once the request has emitted a delta. Raise TimeoutError."""
        async with asyncio.timeout(_PATIENCE_S):
            return await self.recorder.wait_for_first(request_id)


async def start_bench(
    engine: Engine, worker_id: str, epoch: int = 1, recorder: DeltaRecorder | None = None
) -> EngineBench:
    """Start `engine` under a recorder."""
    recorder = recorder or DeltaRecorder()
    if isinstance(engine, VllmReplica):
        preload_core(engine)
    identity = await engine.start(recorder, worker_id=worker_id, epoch=epoch)
    if isinstance(engine, VllmReplica):
        count_start("engines of vLLM", worker_id)
    return EngineBench(engine, identity, recorder)


async def stops_silently(bench: EngineBench, request: EngineRequest) -> None:
    """Stop the engine twice in the midst of `request`; fail if it says anything after that."""
    bench.engine.submit([request])
    recorded = await bench.first_delta(request.request_id)
    await bench.engine.stop()
    seen = (bench.recorder.batches, recorded.deltas)
    await bench.engine.stop()
    for _ in range(100):
        await asyncio.sleep(0)
    assert (bench.recorder.batches, recorded.deltas) == seen
    assert recorded.last is None
    assert bench.recorder.violations == []


class FreshPrompts:
    """Prompts that were not used before, so that none of their prefixes is cached, and sampling for them:
    `greedy` generates twelve tokens, whatever they are."""

    greedy = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)

    def __init__(self, rng: Rng) -> None:
        self._rng = rng

    def fresh(self, length: int) -> list[int]:
        """`length` token ids."""
        return [100 + self._rng.randrange(3900) for _ in range(length)]

    def sampling(self, **changes: Any) -> Sampling:
        """`greedy` with these changes."""
        return replace(self.greedy, **changes)
