"""Data-parallel ranks of a mixture of experts on two nodes, on real vLLM: each answers as one engine does,
and keeps KV in its node's memory.

vLLM's CPU build lacks two collectives of the exchange, which tests/kit/engines/gathering_worker.py adds;
experts are divided in parts, since its kernels cannot divide them whole.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.kit.engines.bench import EngineBench, FreshPrompts, start_bench
from tests.kit.models.architectures import named
from tests.kit.models.maker import make_model
from tests.kit.processes import lives

from kvasir.config.spec.deployment import Deployment, EngineSpec, ModelSpec, PoolSpec
from kvasir.config.spec.tiers import CpuTierSpec, TiersSpec
from kvasir.core.requests import Role, Sampling
from kvasir_workers.engines.nodes import NodePlace, leading
from kvasir_workers.engines.signing.signed_tcp import LIBRARY, PRELOAD_VARIABLE

pytestmark = [pytest.mark.soak, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
GATHERS = {"worker_cls": "tests.kit.engines.gathering_worker.GatheringWorker"}
GREEDY = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
FOLLOWER = """
import asyncio, sys
from kvasir.config.spec.deployment import Deployment
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.engines.vllm.follower import follow

spec = Deployment.model_validate_json(sys.argv[1])
place = NodePlace(1, "127.0.0.1", sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
asyncio.run(follow(spec, spec.pools[0], place, model_path=sys.argv[2]))
"""

# Writes what the prompt's continuation is on each rank, once for each line that it reads.
LEADER = """
import asyncio, json, sys
from dataclasses import replace
from kvasir.config.spec.deployment import Deployment
from kvasir.core.requests import Sampling
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.engines.vllm.engine import VllmEngine
from tests.kit.engines.bench import start_bench

async def main():
    spec = Deployment.model_validate_json(sys.argv[1])
    place = NodePlace(0, sys.argv[3], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
    bench = await start_bench(VllmEngine(spec, spec.pools[0], model_path=sys.argv[2], place=place), "both")
    greedy = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
    while await asyncio.to_thread(sys.stdin.readline):
        prompts = [bench.request(list(range(5, 40)), greedy) for _ in range(2)]
        asked = [replace(each, data_parallel_rank=rank) for rank, each in enumerate(prompts)]
        found = [list(done.choice().tokens) for done in await bench.run(*asked)]
        print("tokens", json.dumps(found), flush=True)

asyncio.run(main())
"""


def deployment(**engine: object) -> Deployment:
    small = {"threads": 1, "kv_cache_bytes": 16 << 20, "kv_events": False}
    pool = PoolSpec(name="both", role=Role.BOTH, engine=EngineSpec.model_validate(small | engine))
    model = ModelSpec(dtype="float32", max_model_len=512)
    return Deployment(model=model, disaggregation="never", pools=(pool,))


@asynccontextmanager
async def running(
    spec: Deployment, folder: str, place: NodePlace | None = None
) -> AsyncIterator[EngineBench]:
    from kvasir_workers.engines.vllm.engine import VllmEngine

    engine = VllmEngine(spec, spec.pools[0], model_path=folder, place=place)
    try:
        yield await start_bench(engine, "both")
    finally:
        await engine.stop()


async def answers(bench: EngineBench, prompts: list[list[int]], rank: int | None) -> list[list[float]]:
    """Return the log-probabilities of what a rank generates for each prompt, all at once."""
    requests = [replace(bench.request(prompt, GREEDY), data_parallel_rank=rank) for prompt in prompts]
    return [[each.sampled.logprob for each in done.choice().logprobs] for done in await bench.run(*requests)]


async def comes_back(
    bench: EngineBench, prompt: list[int], others: list[list[int]], rank: int
) -> list[float]:
    """Return the log-probabilities of what a rank generates for a prompt whose KV has left its device, and
    came back from its node's memory."""
    await answers(bench, others, rank)
    (done,) = await bench.run(replace(bench.request(prompt, GREEDY), data_parallel_rank=rank))
    assert done.last is not None
    assert done.last.usage is not None
    assert done.last.usage.tier_tokens == (len(prompt) - 1) // 32 * 32
    return [each.sampled.logprob for each in done.choice().logprobs]


async def test_every_rank_answers_as_one_engine_does_and_a_lost_node_takes_its_cores_along(
    tmp_path: Path,
) -> None:
    folder = str(make_model(named("qwen3-moe"), tmp_path / "model"))
    prompts = FreshPrompts(random.Random(5))
    asked = [prompts.fresh(length) for length in (2, 33, 120, 300)]
    async with running(deployment(), folder) as alone:
        expected = await answers(alone, asked, None)
    # This process, which has the front, was started without the library that signs.
    small = {"kv_cache_bytes": 4 << 20, "unauthenticated_rendezvous": True}
    spec = deployment(data_parallel_size=2, nodes=2, args=GATHERS, **small)
    spec = spec.model_copy(update={"tiers": TiersSpec(cpu=CpuTierSpec(bytes=32 << 20))})
    place = leading("127.0.0.1")
    arguments = [spec.model_dump_json(), folder, place.leader, str(place.port), str(place.rpc_port), ""]
    follower = psutil.Popen([sys.executable, "-c", FOLLOWER, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL)
    try:
        async with running(spec, folder, place) as spread:
            assert spread.identity.data_parallel_size == 2
            for rank in range(2):
                found = await answers(spread, asked, rank)
                for mine, theirs in zip(found, expected, strict=True):
                    assert mine == pytest.approx(theirs, abs=1e-4)
                others = [prompts.fresh(400) for _ in range(8)]
                again = await comes_back(spread, asked[-1], others, rank)
                assert again == pytest.approx(expected[-1], abs=1e-4)
            below = follower.children(recursive=True)
            assert len(below) >= 2, "a core and a rank"
            follower.kill()
            # The front would not notice: in a pool, Ray does.
            await asyncio.to_thread(psutil.wait_procs, below, timeout=10)
            assert [each for each in below if lives(each)] == [], "cores outlive their node"
    finally:
        follower.kill()
        follower.wait()


def listening(process: psutil.Process) -> set[int]:
    """The TCP ports of a process and of all below it."""
    processes = [process, *process.children(recursive=True)]
    connections = (each for one in processes for each in one.net_connections("tcp"))
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def test_a_stranger_gets_no_connection_to_the_front_the_cores_or_the_ranks(tmp_path: Path) -> None:
    folder = str(make_model(named("qwen3-moe"), tmp_path / "model"))
    spec, place = deployment(data_parallel_size=2, nodes=2, args=GATHERS), leading("127.0.0.1")
    arguments = [
        spec.model_dump_json(),
        folder,
        place.leader,
        str(place.port),
        str(place.rpc_port),
        place.key,
    ]
    with ExitStack() as both:
        follower = psutil.Popen(
            [sys.executable, "-c", FOLLOWER, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL
        )
        leader = psutil.Popen(
            [sys.executable, "-c", LEADER, *arguments],
            cwd=ROOT,
            env={**os.environ, PRELOAD_VARIABLE: str(LIBRARY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        both.enter_context(closing(leader.stdin))
        both.enter_context(closing(leader.stdout))
        for process in (follower, leader):
            both.callback(process.wait)
            both.callback(process.kill)

        def generated() -> str:
            leader.stdin.write("more\n")
            leader.stdin.flush()
            line: str = next(line for line in leader.stdout if line.startswith("tokens "))
            return line

        expected = generated()
        ports = listening(leader) | listening(follower)
        # The front's two queues, the coordinator's three, and stores and groups.
        assert len(ports) > 6, ports
        for port in ports:
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=0.3)
        assert generated() == expected
