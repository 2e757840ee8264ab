"""The identity of a started engine, sent once to routers, other workers and operators."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from kvasir.checkpoint.model_config import read_model_config
from kvasir.config.load.model_files import configured_template
from kvasir.config.load.model_parsers import answers_alike
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.errors import ConfigError
from kvasir.core.identity import NO_KV, KvLayout, WorkerIdentity
from kvasir.core.media.prompts import MediaKind
from kvasir.core.model.work import ModelWork
from kvasir.core.requests import Role
from kvasir.performance.work import model_work
from kvasir_workers.engines.vllm.setup.hardware import hardware_of

_LATENT = "MLAAttentionSpec:"
"""How KvLayout.layout begins where every tensor-parallel rank has all of a block."""


async def identity_of(
    runtime: ModuleType,
    llm: Any,
    deployment: Deployment,
    pool: PoolSpec,
    *,
    model_path: Path,
    worker_id: str,
    epoch: int,
    tokenizer_digest: str,
    reports_kv: bool,
    media: Collection[MediaKind] = (),
) -> WorkerIdentity:
    """Return the identity of `llm`, vLLM's AsyncLLM, as reported by its ranks. `runtime` is the engine's
    module that uses it, and `model_path` the model's own folder, before any quantization. An embed pool
    reports no KV."""
    copies = pool.engine.data_parallel_size
    embeds = pool.role is Role.EMBED
    held = NO_KV if embeds else await _layout(llm, pool)
    shares = await llm.collective_rpc("kvasir_model")
    return WorkerIdentity(
        worker_id=worker_id,
        epoch=epoch,
        pool=pool.name,
        role=pool.role,
        model=deployment.model.name,
        revision=deployment.model.revision,
        tokenizer_digest=tokenizer_digest,
        max_model_len=llm.model_config.max_model_len,
        kv=held.of_whole_ranks() if held.layout.startswith(_LATENT) else held,
        # vLLM's front sums the blocks of all data-parallel ranks.
        kv_blocks=0 if embeds else llm.vllm_config.cache_config.num_gpu_blocks // copies,
        engine="vllm",
        engine_version=runtime.engine_version(),
        transfer=deployment.transfer.kind if deployment.disaggregated and not embeds else "",
        adapters=tuple(each.name for each in deployment.lora),
        data_parallel_size=copies,
        reports_kv=reports_kv,
        images=MediaKind.IMAGE in media,
        media=tuple(sorted(kind.value for kind in media if kind is not MediaKind.IMAGE)),
        any_role=not embeds and answers_alike(deployment, pool),
        hardware=hardware_of(
            shares[0]["device"], devices=pool.engine.ranks, element_bytes=shares[0]["element_bytes"]
        ),
        model_parameters=copies * sum(share["parameters"] for share in shares),
        model_bytes=copies * sum(share["bytes"] for share in shares),
        work=await asyncio.to_thread(_work, model_path),
        golden=await asyncio.to_thread(
            runtime.golden, llm, deployment.model.name, configured_template(deployment.model.chat_template)
        ),
        shared_tier=""
        if embeds
        else await asyncio.to_thread(_shared_tier, deployment, pool, held, model_path),
    )


async def _layout(llm: Any, pool: PoolSpec) -> KvLayout:
    """Return the layout of the first tensor-parallel rank over all pipeline stages."""
    ranks = pool.engine.tensor_parallel_size
    stages = (await llm.collective_rpc("kvasir_kv_layout"))[::ranks]
    summed = {name: sum(stage[name] for stage in stages) for name in ("layers", "bytes_per_block")}
    return KvLayout(**{**stages[0], **summed}, tensor_parallel_size=ranks)


def _work(model_path: Path) -> ModelWork | None:
    """Return the sizes of the model, None if its configuration has none."""
    try:
        found = model_work(read_model_config(model_path))
    except ConfigError:
        return None
    return found if found.layers and found.dense else None


def _shared_tier(deployment: Deployment, pool: PoolSpec, layout: KvLayout, model_path: Path) -> str:
    remote, model = deployment.tiers.redis, deployment.model
    if remote is None:
        return ""
    # Imported only by engines with that tier, because it lengthens the start.
    from kvasir_workers.tiers.setup import mark_of, shared_tier

    adapters = {each.name: each.path for each in deployment.lora}
    name = f"{model.name} {model.dtype} {model.quantization}"
    stages = pool.engine.pipeline_parallel_size
    mark = mark_of(name, model.revision, layout, model_path, adapters, stages=stages)
    return shared_tier(remote, mark)
