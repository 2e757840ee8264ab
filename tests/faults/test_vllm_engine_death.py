"""Real vLLM processes that exit: errors of the engine port, and resources that remain."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from typing import Any

import pytest
import pytest_asyncio
from tests.kit.engines.bench import EngineBench
from tests.kit.engines.recorder import FullRecorder
from tests.kit.shared.engines import EngineRegistry, engines_of
from tests.kit.shared.specs import OVER_NCCL
from tests.kit.suite.started import count_start

from kvasir.config.load.model_files import resolve_model
from kvasir.core.requests import EngineRequest, FinishReason, Sampling, token_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LONG = Sampling(temperature=0.0, max_tokens=450, ignore_eos=True)
ATTEMPTS = 5

FRONT = """
import asyncio, multiprocessing, sys
from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec, PoolSpec
from kvasir.core.requests import Role
from kvasir_workers.engines.vllm.engine import VllmEngine

async def main():
    pool = PoolSpec(name="both", role=Role.BOTH, engine=EngineSpec(kv_cache_bytes=16 << 20, threads=1))
    spec = Deployment(disaggregation="never", pools=(pool,), model=ModelSpec(max_model_len=512))
    engine = VllmEngine(spec, pool, model_path=sys.argv[1])
    await engine.start(lambda batch: None, worker_id="w", epoch=1)
    print("cores", *(child.pid for child in multiprocessing.active_children()), flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def bench(engines: EngineRegistry) -> EngineBench:
    return (await engines.running(*engines_of(OVER_NCCL)))[1]


def cores_of(engine: Any) -> list[Any]:
    """The processes below an engine."""
    return list(engine._llm.engine_core.resources.engine_manager.processes)


@pytest.mark.asyncio(loop_scope="session")
async def test_streams_of_one_step_arrive_in_one_batch(bench: EngineBench) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
    recorder = bench.recorder
    assert isinstance(recorder, FullRecorder)
    for _ in range(ATTEMPTS):
        before, merged = recorder.batches, recorder.merged
        await bench.run(*(bench.request(range(8, 20 + number), sampling) for number in range(16)))
        steps = recorder.batches - before
        if recorder.merged == merged:
            break
    # Sixteen streams of forty tokens are 640 deltas; admission may spread over a few steps.
    assert 40 <= steps <= 60


@pytest.mark.stops_stack
@pytest.mark.asyncio(loop_scope="session")
async def test_a_killed_core_ends_every_stream_and_is_reported(bench: EngineBench) -> None:
    failed = asyncio.ensure_future(bench.engine.wait_failed())
    requests = [EngineRequest(f"r{n}", token_ids(range(9 + n)), LONG) for n in range(4)]
    bench.engine.submit(requests)
    await bench.first_delta("r0")
    for core in cores_of(bench.engine):
        core.kill()
    async with asyncio.timeout(30):
        reason = await failed
        ends = [await bench.recorder.wait(request.request_id) for request in requests]
    assert "core" in reason
    assert all(end.last is not None and end.last.error == "engine_dead" for end in ends)
    (late,) = await bench.run(EngineRequest("late", token_ids([5, 6]), LONG))
    assert late.last is not None
    assert (late.last.finish, late.last.error) == (FinishReason.ERROR, "engine_dead")


def test_a_killed_front_leaves_no_core_behind() -> None:
    pytest.importorskip("vllm")
    count_start("engines of vLLM", "in a process that is killed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    front = subprocess.Popen(
        [sys.executable, "-c", FRONT, str(resolve_model("kvasir-tiny"))],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert front.stdout is not None
    try:
        line = next((text for text in front.stdout if text.startswith("cores ")), "")
        cores = [os.pidfd_open(int(pid)) for pid in line.split()[1:]]
        assert cores, "the engine did not start"
    finally:
        front.send_signal(signal.SIGKILL)
        front.wait()
        front.stdout.close()
    poll = select.poll()
    for core in cores:
        poll.register(core, select.POLLIN)
    left = {descriptor for descriptor, _ in poll.poll(10_000)}
    assert left == set(cores)
    for core in cores:
        os.close(core)
