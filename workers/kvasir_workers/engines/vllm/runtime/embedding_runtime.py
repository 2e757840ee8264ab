"""The embedding engine's use of vLLM's own classes. Imported only after vLLM's environment is set."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from vllm import PoolingParams
from vllm.v1.engine.async_llm import AsyncLLM

from kvasir.core.requests import EMPTY_SAMPLING, EngineRequest, token_ids
from kvasir_workers.engines.vllm.runtime import engine_runtime as runtime
from kvasir_workers.engines.vllm.setup.load import LoadRecorder

REFUSED = runtime.REFUSED
DEAD = runtime.DEAD
platform = runtime.platform
engine_version = runtime.engine_version
shut_down = runtime.shut_down
recorder = runtime.recorder
lora_requests = runtime.lora_requests
golden = runtime.golden


def build(arguments: Mapping[str, Any]) -> AsyncLLM:
    """Start the engine core and load the model; blocks for seconds to minutes. Raises as runtime.build."""
    return AsyncLLM.from_engine_args(runtime.engine_args(arguments), stat_loggers=[LoadRecorder])


async def add(llm: AsyncLLM, request: EngineRequest, lora: Any = None, *, classes: bool = False) -> Any:
    """Pass an input to the engine, for its embedding or the probabilities of its `classes`; return vLLM's
    collector of its output. Raise one of REFUSED or DEAD."""
    change = request.second_text_at
    return await llm.add_request(
        request.request_id,
        runtime.prompt(request),
        PoolingParams(
            task="classify" if classes else "embed",
            extra_kwargs=None if change is None else {"compressed_token_type_ids": change},
        ),
        lora_request=lora,
        priority=request.priority,
    )


async def warm_up(llm: AsyncLLM, tokens: int, *, classes: bool = False) -> None:
    """Run an input of `tokens`, and discard the result."""
    request = EngineRequest("kvasir-warm-up", token_ids([1] * tokens), EMPTY_SAMPLING)
    collector = await add(llm, request, classes=classes)
    await collector.get()
    await llm.reset_prefix_cache()


def vector(output: Any) -> array[float]:
    """Return the embedding, or the probabilities, in a vllm.outputs.PoolingRequestOutput, as float32."""
    return array("f", output.outputs.data.float().cpu().contiguous().numpy().tobytes())
