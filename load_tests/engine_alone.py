"""vLLM without Kvasir, with the arguments of the default deployment's decode pool and no connector: the floor
for the stack's throughput.

Reads one JSON object per line ({"prompts": [...], "tokens": n}), generates all prompts in one batch with
greedy sampling, and prints {"alone": {"rate": tokens per second}}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.requests import Role
from kvasir_workers.engines.vllm.setup.arguments import engine_arguments, environment


def _deployment() -> Deployment:
    decode = Deployment().pool("decode").engine
    both = PoolSpec(name="both", role=Role.BOTH, engine=decode)
    return Deployment(disaggregation="never", pools=(both,))


async def _serve() -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    deployment = _deployment()
    pool = deployment.pools[0]
    arguments = engine_arguments(
        deployment,
        pool,
        model_path=str(resolve_model(deployment.model.source)),
        platform="cpu",
    )
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def one(number: int, prompt: str, tokens: int) -> int:
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        count = 0
        async for output in engine.generate(prompt, sampling, f"r{number}-{time.perf_counter_ns()}"):
            count += len(output.outputs[0].token_ids)
        return count

    print(json.dumps({"alone": {"rate": 0.0}}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        wanted = json.loads(line)
        began = time.perf_counter()
        counts = await asyncio.gather(
            *(one(number, prompt, wanted["tokens"]) for number, prompt in enumerate(wanted["prompts"]))
        )
        rate = sum(counts) / (time.perf_counter() - began)
        print(json.dumps({"alone": {"rate": rate}}), flush=True)
    engine.shutdown()


def main() -> None:
    deployment = _deployment()
    os.environ.update(
        environment(deployment, deployment.pools[0], cpus=len(os.sched_getaffinity(0)), platform="cpu")
    )
    asyncio.run(_serve())


if __name__ == "__main__":
    main()
