"""How an adapter is given to vLLM, and taken away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import RequestError
from kvasir_workers.engines.vllm.engine import VllmEngine


class Llm:
    """The part of vLLM's AsyncLLM that adapters need."""

    def __init__(self) -> None:
        self.loras: dict[int, Any] = {}

    async def add_lora(self, lora: Any) -> None:
        if lora.path.endswith("wrong"):
            raise Exception("LoRA rank 9 is greater than max_lora_rank 8")
        self.loras[lora.lora_int_id] = lora

    async def remove_lora(self, number: int) -> None:
        del self.loras[number]


@pytest.fixture
def engine() -> VllmEngine:
    def lora_request(name: str, number: int, path: str) -> Any:
        return SimpleNamespace(lora_name=name, lora_int_id=number, path=path)

    deployment = Deployment()
    made = VllmEngine(deployment, deployment.pools[0], model_path="/m")
    made._llm, made._runtime = Llm(), SimpleNamespace(lora_request=lora_request)  # type: ignore[assignment]
    return made


def test_each_adapter_has_a_number_of_its_own_also_after_another_was_removed(engine: VllmEngine) -> None:
    async def scenario() -> None:
        await engine.add_adapter("a@1", Path("/a"))
        await engine.add_adapter("b@1", Path("/b"))
        await engine.remove_adapter("a@1")
        await engine.add_adapter("a@2", Path("/a"))
        await engine.remove_adapter("nothing")

    asyncio.run(scenario())
    loras = {number: (each.lora_name, each.path) for number, each in engine._llm.loras.items()}
    assert loras == {2: ("b@1", "/b"), 3: ("a@2", "/a")}
    assert engine.adapter_legs("a@2") == 0


def test_what_vllm_says_against_an_adapter_is_the_reason(engine: VllmEngine) -> None:
    with pytest.raises(RequestError, match="LoRA rank 9 is greater") as caught:
        asyncio.run(engine.add_adapter("a@1", Path("/wrong")))
    assert caught.value.code == "adapter_refused"
    assert engine._adapters == {}
