"""What contract tests stand on: engines behind one factory each, vLLM's own parts, and a real Redis."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import pytest
import pytest_asyncio
from tests.kit.engines.bench import EngineBench, FreshPrompts, start_bench
from tests.kit.engines.recorder import FullRecorder
from tests.kit.lab.redis_server import RedisServer
from tests.kit.lab.s3_server import ENVIRONMENT, S3Server
from tests.kit.shared.engines import EngineRegistry, engines_of
from tests.kit.shared.specs import BLOCK, CHUNK, PLAIN, apart

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment, EngineSpec, SimSpec
from kvasir.ports.engine import Engine
from kvasir_workers.engines.vllm.setup.arguments import environment


class EngineFactory(Protocol):
    """Makes engines of one kind that can reach each other; `pool` is `prefill` or `decode`."""

    def __call__(self, pool: str) -> Engine: ...


@pytest.fixture(scope="session")
def sim_engine_factory() -> EngineFactory:
    from kvasir_workers.engines.sim.engine import SimEngine
    from kvasir_workers.engines.sim.fabric import SimFabric

    timing = SimSpec(
        prefill_tokens_per_s=1e7, decode_step_s=2e-4, decode_step_per_seq_s=0.0, transfer_latency_s=1e-4
    )
    engine = EngineSpec(
        kind="sim", block_size=BLOCK, kv_cache_bytes=16 << 20, max_num_batched_tokens=CHUNK, sim=timing
    )
    deployment = apart(engine, overlap="always")
    fabric = SimFabric()

    def make(pool: str) -> Engine:
        return SimEngine(deployment, deployment.pool(pool), clock=MonotonicClock(), fabric=fabric)

    return make


@pytest.fixture(scope="session", params=["sim", pytest.param("vllm", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(
    kind: str, engines: EngineRegistry, sim_engine_factory: EngineFactory
) -> AsyncIterator[list[EngineBench]]:
    """An engine that prefills, and one that decodes."""
    if kind == "vllm":
        yield list(await engines.running(*engines_of(PLAIN)))
        return
    made = [
        await start_bench(sim_engine_factory(pool), f"{pool}-0", recorder=FullRecorder())
        for pool in ("prefill", "decode")
    ]
    yield made
    for bench in made:
        await bench.engine.stop()
        assert bench.recorder.violations == []


@pytest.fixture
def prefill(pair: list[EngineBench]) -> EngineBench:
    return pair[0]


@pytest.fixture
def bench(pair: list[EngineBench]) -> EngineBench:
    return pair[1]


@pytest.fixture(scope="session")
def prompts() -> FreshPrompts:
    return FreshPrompts(random.Random(1))


@pytest.fixture(scope="module")
def runtime() -> Iterator[Any]:
    """The worker's module that touches vLLM, imported under the environment that a worker gives it."""
    pytest.importorskip("vllm")
    before = dict(os.environ)
    deployment = Deployment()
    os.environ.update(environment(deployment, deployment.pools[0], cpus=1, platform="cpu"))
    from vllm.envs import disable_envs_cache

    from kvasir_workers.engines.vllm.runtime import engine_runtime as module

    # An engine's core in this process has vLLM keep the environment of its start.
    disable_envs_cache()
    yield module
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, and its credentials in the environment."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return s3_server
