"""The engines of vLLM that tests of one process share, by their spec.

What a test asks for runs when it begins, and other shared engines do not: a small machine has room for few.
So files that share an engine are a group of the schedule (tests/kit/suite/schedule.py), whose files follow
each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.kit.engines.bench import EngineBench, start_bench
from tests.kit.engines.recorder import FullRecorder

from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment
from kvasir.core.requests import Role
from kvasir.ports.engine import Engine


@dataclass(frozen=True, slots=True)
class WantedEngine:
    """An engine of `pool`, as the worker `worker_id`. `variant` names what the spec does not say, such as a
    module that a test replaces; `cache_folder` has copies of the model."""

    deployment: Deployment
    pool: str
    worker_id: str
    epoch: int = 1
    variant: str = ""
    cache_folder: Path | None = None

    @property
    def key(self) -> str:
        """Equal for engines that a test cannot tell apart."""
        own = self.deployment.model_copy(update={"pools": (self.deployment.pool(self.pool),)})
        return f"{self.worker_id} {self.epoch} {self.variant} {own.model_dump_json()}"

    async def start(self) -> EngineBench:
        """Start it under a recorder."""
        pytest.importorskip("vllm")
        from kvasir_workers.engines.vllm.embedding import VllmEmbeddingEngine
        from kvasir_workers.engines.vllm.engine import VllmEngine

        pool = self.deployment.pool(self.pool)
        folder = str(resolve_model(self.deployment.model.source))
        engine: Engine
        if pool.role is Role.EMBED:
            engine = VllmEmbeddingEngine(self.deployment, pool, model_path=folder)
        else:
            engine = VllmEngine(self.deployment, pool, model_path=folder, cache_folder=self.cache_folder)
        return await start_bench(engine, self.worker_id, self.epoch, FullRecorder())


def engines_of(deployment: Deployment, cache_folder: Path | None = None) -> list[WantedEngine]:
    """The first engine of each pool."""
    return [
        WantedEngine(deployment, each.name, f"{each.name}-0", cache_folder=cache_folder)
        for each in deployment.pools
    ]


class EngineRegistry:
    """See the module."""

    def __init__(self) -> None:
        self._running: dict[str, EngineBench] = {}

    async def running(self, *wanted: WantedEngine) -> Sequence[EngineBench]:
        """These engines, started at once unless they run already; other shared ones are stopped."""
        keys = [each.key for each in wanted]
        await self._stop([key for key in self._running if key not in keys])
        missing = [each for each in wanted if each.key not in self._running]
        for each, bench in zip(missing, await _start(missing), strict=True):
            self._running[each.key] = bench
        return [self._running[key] for key in keys]

    @asynccontextmanager
    async def alone(self, *wanted: WantedEngine) -> AsyncIterator[Sequence[EngineBench]]:
        """Engines for one test, beside those that are shared, which are stopped when the block ends."""
        benches = await _start(wanted)
        try:
            yield benches
            _check(benches)
        finally:
            await asyncio.gather(*(bench.engine.stop() for bench in benches))

    async def stop(self) -> None:
        """Stop all that are shared."""
        await self._stop(list(self._running))

    async def _stop(self, keys: list[str]) -> None:
        benches = [self._running.pop(key) for key in keys]
        await asyncio.gather(*(bench.engine.stop() for bench in benches))
        _check(benches)


async def _start(wanted: Sequence[WantedEngine]) -> list[EngineBench]:
    """Start all at once. Raise the first error once the others are stopped."""
    made = await asyncio.gather(*(each.start() for each in wanted), return_exceptions=True)
    failed = [each for each in made if isinstance(each, BaseException)]
    benches = [each for each in made if not isinstance(each, BaseException)]
    if failed:
        await asyncio.gather(*(bench.engine.stop() for bench in benches))
        raise failed[0]
    return benches


def _check(benches: Sequence[EngineBench]) -> None:
    assert [violation for bench in benches for violation in bench.recorder.violations] == []
