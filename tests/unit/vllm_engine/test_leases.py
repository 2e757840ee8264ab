"""How leases are released: beside admissions, because vLLM answers only between two steps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from kvasir.config.spec.deployment import Deployment
from kvasir.core.requests import EngineRequest, Leg, Sampling, token_ids
from kvasir_workers.engines.vllm.engine import VllmEngine

PATIENCE_S = 30.0


class DeadError(Exception):
    """Stands for vLLM's error of an engine that has ended."""


class Llm:
    """The part of vLLM's AsyncLLM that admissions and leases need. An engine core that computes a step until
    `stepped`."""

    def __init__(self) -> None:
        self.admitted = asyncio.Event()
        self.stepped = asyncio.Event()
        self.asked = asyncio.Event()
        self.released: list[list[str]] = []

    async def add_request(self, *_: Any, **__: Any) -> Any:
        self.admitted.set()
        return SimpleNamespace(output=None)

    async def collective_rpc(self, method: str, args: tuple[list[str]]) -> None:
        assert method == "kvasir_release_leases"
        self.released.append(args[0])
        self.asked.set()
        await self.stepped.wait()


def engine(llm: Llm) -> VllmEngine:
    deployment = Deployment()
    made = VllmEngine(deployment, deployment.pools[0], model_path="/m")
    made._record = None
    runtime: Any = SimpleNamespace(
        DEAD=DeadError,
        REFUSED=(ValueError,),
        EngineControl=lambda *_, **__: None,
        prompt=lambda request: request.tokens,
        sampling_params=lambda request, **_: request.sampling,
    )
    made._llm, made._runtime = llm, runtime
    return made


async def test_a_prompt_is_admitted_while_the_release_of_a_lease_waits_for_the_end_of_a_step() -> None:
    llm = Llm()
    made = engine(llm)
    tasks = made._endless()
    try:
        made.release(["a"])
        async with asyncio.timeout(PATIENCE_S):
            await llm.asked.wait()
            made.submit([EngineRequest("r", token_ids([1, 2]), Sampling(max_tokens=1), leg=Leg.PREFILL)])
            await llm.admitted.wait()
        made.release(["b", "c", "b"])
        assert llm.released == [["a"]]
        llm.asked.clear()
        llm.stepped.set()
        async with asyncio.timeout(PATIENCE_S):
            await llm.asked.wait()
        assert llm.released == [["a"], ["b", "c"]]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
