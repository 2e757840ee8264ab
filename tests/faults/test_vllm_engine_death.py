"""Real vLLM processes that exit: errors of the engine port, and resources that remain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import pytest_asyncio
from tests.kit.engines.bench import EngineBench, stops_silently
from tests.kit.engines.recorder import FullRecorder
from tests.kit.shared.engines import EngineRegistry, engines_of

from kvasir.config.spec.deployment import Deployment
from kvasir.core.requests import EngineRequest, FinishReason, Sampling, token_ids

pytestmark = pytest.mark.slow

LONG = Sampling(temperature=0.0, max_tokens=450, ignore_eos=True)
ATTEMPTS = 5


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(engines: EngineRegistry, over_nccl: Deployment) -> Sequence[EngineBench]:
    return await engines.running(*engines_of(over_nccl))


@pytest.fixture
def bench(pair: Sequence[EngineBench]) -> EngineBench:
    """The engine that does not speculate, so that a step is a token of each stream."""
    return pair[0]


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
async def test_stop_ends_silently_and_twice_is_once(pair: Sequence[EngineBench]) -> None:
    bench = pair[1]
    await stops_silently(bench, bench.request(range(100, 150), LONG))


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
