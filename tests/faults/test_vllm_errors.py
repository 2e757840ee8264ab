"""Codes that only an engine causes, each caused by a real vLLM: through a gateway, a router, and sessions
over gRPC with a prefill and a decode worker, neither of which can take over from the other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from tests.kit.engines.served import ServedWorker, in_front_of, serving_worker
from tests.kit.sim.product import error_of

from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import (
    Deployment,
    EngineSpec,
    GatewaySpec,
    ModelSpec,
    PoolSpec,
    RoutingSpec,
    SloSpec,
    SpeculativeSpec,
    TransferSpec,
)
from kvasir.core.requests import Role

pytestmark = pytest.mark.slow

WITHIN_S = 60.0
ENGINE = EngineSpec(kind="vllm", block_size=32, kv_cache_bytes=64 << 20, threads=1)
SPECULATING = ENGINE.model_copy(update={"speculative": SpeculativeSpec(tokens=3)})
APART = Deployment(
    model=ModelSpec(dtype="float32", max_model_len=2048),
    disaggregation="always",
    transfer=TransferSpec(on_failure="fail"),
    routing=RoutingSpec(max_retries=0),
    pools=(
        PoolSpec(name="prefill", role=Role.PREFILL, engine=ENGINE),
        PoolSpec(name="decode", role=Role.DECODE, engine=SPECULATING),
    ),
    gateway=GatewaySpec(port=0, drain_timeout_s=0.0),
    # No request is refused because engines are slow on a loaded machine.
    slo=(SloSpec(name="default", ttft_s=240.0, itl_s=1.0),),
)
ASKED = {"model": "kvasir-tiny", "prompt": "hi", "max_tokens": 8, "temperature": 0}
PATTERNS, REPEATED, RULES = 200, 100, 48
"""A schema of so many patterns takes a core seconds to read, and so many of them, two at a time, far more
than the ten seconds that a request waits for its turn, also on a fast machine."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair() -> AsyncIterator[list[ServedWorker]]:
    """The prefill and the decode worker."""
    pytest.importorskip("vllm")
    from kvasir_workers.engines.vllm.engine import VllmEngine

    async with AsyncExitStack() as stack:

        async def started(pool: PoolSpec) -> ServedWorker:
            engine = VllmEngine(APART, pool, model_path=str(resolve_model(APART.model.source)))
            return await stack.enter_async_context(serving_worker(engine, pool.name))

        yield list(await asyncio.gather(*map(started, APART.pools)))


@pytest_asyncio.fixture(loop_scope="session")
async def client(pair: list[ServedWorker]) -> AsyncIterator[httpx.AsyncClient]:
    async with in_front_of(pair, APART) as made:
        yield made


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=ASKED | fields)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.005)


def core_of(worker: ServedWorker) -> psutil.Process:
    """The process in which the worker's vLLM computes."""
    engine: Any = worker.engine
    (core,) = engine._llm.engine_core.resources.engine_manager.processes
    return psutil.Process(core.pid)


@pytest.mark.asyncio(loop_scope="session")
async def test_what_vllm_refuses_or_trips_over_ends_one_request(client: httpx.AsyncClient) -> None:
    told = error_of(await ask(client, logit_bias={"5": 1}), "invalid_request")
    assert "not yet supported with speculative decoding" in told
    # Nothing that the grammar takes may be drawn.
    told = error_of(await ask(client, guided_choice=["yes", "no"], allowed_token_ids=[5]), "worker_failed")
    assert "internal error" in told
    assert (await ask(client)).status_code == 200


@pytest.mark.asyncio(loop_scope="session")
async def test_rules_beyond_those_that_wait_for_the_compiler_are_refused(client: httpx.AsyncClient) -> None:
    rules = [asyncio.create_task(ask(client, guided_json=slow_and_wrong(each))) for each in range(RULES)]
    answers = await asyncio.gather(*rules)
    refused = [answer for answer in answers if answer.status_code == 503]
    assert refused, answers[0].text
    assert "busy with tools, schemas and media of other requests" in error_of(refused[0], "worker_overloaded")


def slow_and_wrong(seed: int) -> dict[str, Any]:
    """A schema that is refused once all of it was read, so that nothing is left to be compiled."""
    draw = random.Random(seed)

    def word() -> str:
        return "".join(draw.choices("abcdefgh", k=5))

    fields = {f"p{n}": f"^({word()}|{word()}){{1,{REPEATED}}}$" for n in range(PATTERNS)} | {"z": "("}
    return {"properties": {name: {"type": "string", "pattern": each} for name, each in fields.items()}}


@pytest.mark.stops_stack
@pytest.mark.asyncio(loop_scope="session")
async def test_a_killed_core_ends_what_ran_there_and_what_waited_for_its_kv(
    pair: list[ServedWorker], client: httpx.AsyncClient
) -> None:
    prefill, decode = pair
    decode.line.stall()
    handed = asyncio.create_task(ask(client))
    await until(lambda: prefill.host.held_leases == 1)
    core = core_of(prefill)
    core.suspend()
    running = asyncio.create_task(ask(client, prompt="others"))
    await until(lambda: prefill.host.live_requests == 1)
    core.kill()
    decode.line.resume()
    told = error_of(await handed, "transfer_failed")
    assert "transfer.on_failure is fail" in told
    core_of(decode).kill()
    assert "vLLM's engine core ended" in error_of(await running, "engine_dead")
