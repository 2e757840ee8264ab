"""One run of one model, in a process of its own: vLLM alone, or Kvasir's engines around it.

    python -m load_tests.scenarios.models.engines MODE NAME FOLDER ADAPTER

prints what was generated for the same prompts as JSON. Modes: `plain` is vLLM without Kvasir; `whole` one
engine that moves no KV; `apart` two engines with a hand-off between them; `tiers` one whose cache is emptied
before each prompt comes again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.kit.engines.bench import EngineBench, start_bench
from tests.kit.engines.recorder import Recorded
from tests.kit.models.architectures import TinyModel, named
from tests.kit.models.maker import RANK

from kvasir.config.checks.cpu_kernels import loses_prefixes
from kvasir.config.spec.deployment import Deployment, EngineSpec, LoraSpec, ModelSpec, PoolSpec
from kvasir.config.spec.tiers import CpuTierSpec, TiersSpec
from kvasir.core.requests import EngineRequest, KvHandoff, Leg, PositionLogprobs, Role, Sampling
from kvasir_workers.engines.vllm.engine import VllmEngine
from kvasir_workers.engines.vllm.setup.arguments import environment

LENGTHS = (33, 64, 200, 350, 500, 700, 1000, 1300, 1600, 2000)
OUTPUT = 16
LOGPROBS = 5
BLOCK = 32
STEP_TOKENS = 512
KV_BYTES = 64 << 20
CONTEXT = 2560
MARK = "RESULT "
_EMPTYING = 50

Logprobs = list[dict[int, float]]


@dataclass
class Generated:
    """What one run generated: token ids by prompt, and the log-probabilities of the likeliest tokens at each
    position; the same with the adapter. `cached` are the tokens of each prompt that were found in a cache
    when it came again, and `moved` those that came from another worker or a tier."""

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    adapted: list[list[int]] = field(default_factory=list)
    again: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    parameters: int = 0


def prompts() -> list[list[int]]:
    """Return the prompts, the same in each run."""
    rng = random.Random(7)
    return [[100 + rng.randrange(3900) for _ in range(length)] for length in LENGTHS]


def main() -> None:
    mode, name, folder, adapter = sys.argv[1:5]
    model, source = named(name), Path(folder)
    run = plain if mode == "plain" else kvasir
    made = run(mode, model, source, Path(adapter))
    print(MARK + json.dumps(asdict(made)))


def plain(_: str, model: TinyModel, folder: Path, adapter: Path) -> Generated:
    """Run vLLM without Kvasir, and without a cache of prefixes, unless that changes how prompts are
    computed."""
    spec = Deployment()
    os.environ.update(environment(spec, spec.pools[0], cpus=1, platform="cpu"))
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=str(folder),
        dtype=model.dtype,
        max_model_len=CONTEXT,
        block_size=BLOCK,
        kv_cache_memory_bytes=KV_BYTES,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=model.recurrent,
        enable_lora=bool(model.adapts),
        max_lora_rank=RANK,
        disable_log_stats=True,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=LOGPROBS)
    lora = LoRARequest("adapter", 1, str(adapter)) if model.adapts else None

    def one(prompt: Sequence[int], adapted: Any = None) -> Any:
        inputs = [{"prompt_token_ids": list(prompt)}]
        (done,) = llm.generate(inputs, sampling, use_tqdm=False, lora_request=adapted)
        return done.outputs[0]

    made = Generated()
    for prompt in prompts():
        out = one(prompt)
        made.tokens.append(list(out.token_ids))
        made.logprobs.append([{int(t): each.logprob for t, each in at.items()} for at in out.logprobs])
        if lora is not None:
            made.adapted.append(list(one(prompt, lora).token_ids))
    return made


def kvasir(mode: str, model: TinyModel, folder: Path, adapter: Path) -> Generated:
    """Run Kvasir's engines."""
    return asyncio.run(_kvasir(mode, model, folder, adapter))


def _deployment(mode: str, model: TinyModel, folder: Path, adapter: Path) -> Deployment:
    engine = EngineSpec(
        block_size=BLOCK,
        kv_cache_bytes=KV_BYTES,
        threads=1,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=8,
        prefix_caching=not loses_prefixes((model.architecture,)),
    )
    apart = (Role.PREFILL, Role.DECODE)
    roles = apart if mode == "apart" else (Role.BOTH,)
    return Deployment(
        model=ModelSpec(source=str(folder), dtype=model.dtype, max_model_len=CONTEXT),
        lora=(LoraSpec(name="adapter", path=str(adapter), rank=RANK),) if model.adapts else (),
        disaggregation="always" if mode == "apart" else "never",
        pools=tuple(PoolSpec(name=role.value, role=role, engine=engine) for role in roles),
        tiers=TiersSpec(cpu=CpuTierSpec(bytes=256 << 20)) if mode == "tiers" else TiersSpec(),
    )


async def _kvasir(mode: str, model: TinyModel, folder: Path, adapter: Path) -> Generated:
    spec = _deployment(mode, model, folder, adapter)
    engines = [VllmEngine(spec, pool, model_path=str(folder)) for pool in spec.pools]
    benches: list[EngineBench] = []
    try:
        for engine, pool in zip(engines, spec.pools, strict=True):
            benches.append(await start_bench(engine, f"{pool.name}-0"))
        return await _generate(mode, model, benches)
    finally:
        await asyncio.gather(*(bench.engine.stop() for bench in benches))


async def _generate(mode: str, model: TinyModel, benches: Sequence[EngineBench]) -> Generated:
    made = Generated(parameters=benches[0].identity.model_parameters)
    for prompt in prompts():
        done = await _one(benches, prompt)
        made.tokens.append(done.choice().tokens)
        made.logprobs.append([_likeliest(each) for each in done.choice().logprobs])
        if mode == "tiers":
            await _empty(benches[0])
        again = await _one(benches, prompt)
        made.again.append(again.choice().tokens)
        found = again.last.usage if again.last is not None else None
        first = done.last.usage if done.last is not None else None
        made.cached.append(found.cached_tokens if found is not None else 0)
        if mode == "apart":
            made.moved.append(first.transferred_tokens if first is not None else 0)
        elif mode == "tiers":
            made.moved.append(found.tier_tokens if found is not None else 0)
        if model.adapts:
            made.adapted.append((await _one(benches, prompt, adapter="adapter")).choice().tokens)
    return made


async def _empty(bench: EngineBench) -> None:
    """Empty the cache on the device. Raise RuntimeError if its blocks stay in use."""
    assert isinstance(bench.engine, VllmEngine)
    for _ in range(_EMPTYING):
        # Stores end in later steps.
        await bench.generate([7], Sampling(max_tokens=1))
        if await bench.engine._llm.reset_prefix_cache():
            return
    raise RuntimeError("the prefix cache cannot be emptied")


async def _one(benches: Sequence[EngineBench], prompt: list[int], adapter: str | None = None) -> Recorded:
    """Run one prompt, on one engine or handed from the first to the second. Raise RuntimeError if it
    fails."""
    sampling = Sampling(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=LOGPROBS)

    async def leg(bench: EngineBench, kind: Leg, handoff: KvHandoff | None = None) -> Recorded:
        request: EngineRequest = bench.request(prompt, sampling, leg=kind, handoff=handoff)
        (done,) = await bench.run(replace(request, adapter=adapter))
        if done.last is None or done.last.error:
            raise RuntimeError(f"{kind}: {done.last and done.last.error_message}")
        return done

    if len(benches) == 1:
        return await leg(benches[0], Leg.FULL)
    offered = await leg(benches[0], Leg.PREFILL)
    handoff = offered.last.handoff if offered.last is not None else None
    return await leg(benches[1], Leg.DECODE, handoff)


def _likeliest(position: PositionLogprobs) -> dict[int, float]:
    return {each.token_id: each.logprob for each in (position.sampled, *position.top)}


if __name__ == "__main__":
    main()
