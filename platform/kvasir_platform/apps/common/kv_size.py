"""The size of the KV cache of a worker on CPUs, where the spec leaves it open.

It depends on the memory that is free where the worker starts, and on how many share it, which only the whole
deployment shows. A worker on a GPU needs no such size: its engine measures what is left.
"""

from __future__ import annotations

from pathlib import Path

from kvasir.checkpoint.model_config import ModelConfig, read_model_config
from kvasir.checkpoint.tensors import read_tensors
from kvasir.config.load.model_files import resolve_model
from kvasir.config.load.model_support import needs_weights, with_length
from kvasir.config.load.object_storage import is_object_uri, stated_weight_bytes
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.sizing.adapters import adapter_bytes
from kvasir.sizing.host import host_kv_bytes
from kvasir.sizing.pools import shape_of
from kvasir.sizing.weights import WeightPart, rank_weights, stated_parts, weight_parts


def with_kv_size(
    deployment: Deployment, view: Deployment, name: str, *, free: int, alone: bool
) -> Deployment:
    """Return `view`, the part of `deployment` that the worker of pool `name` uses, with the size of that
    pool's KV cache. `free` is the available memory in bytes, of which the worker has all if it is `alone`, or
    otherwise an equal share with every replica on CPUs. Raises ConfigError if the model is not found."""
    pool = view.pool(name)
    if pool.engine.kv_cache_bytes is not None or not _on_cpus(pool):
        return view
    if alone:
        sharing = max(1, pool.engine.ranks // pool.engine.nodes)
    else:
        sharing = sum(each.engine.ranks * each.most for each in deployment.pools if _on_cpus(each))
    folder = resolve_model(view.model.source, view.model.revision)
    config, length = read_model_config(folder), with_length(view, folder).model.context_length
    shape = shape_of(view, pool, max_model_len=length)
    parts = _parts(view, folder, config)
    stages = zip(rank_weights(config, parts, shape), adapter_bytes(config, parts, shape), strict=True)
    weights = max(map(sum, stages))
    size = host_kv_bytes(
        view, pool, config, max_model_len=length, free=free // max(1, sharing), weights=weights
    )
    sized = pool.model_copy(update={"engine": pool.engine.model_copy(update={"kv_cache_bytes": size})})
    return view.model_copy(update={"pools": tuple(sized if each is pool else each for each in view.pools)})


def _parts(view: Deployment, folder: Path, config: ModelConfig) -> tuple[WeightPart, ...]:
    if is_object_uri(view.model.source):
        return stated_parts(stated_weight_bytes(folder))
    return weight_parts(config, read_tensors(folder) if needs_weights(view) else ())


def _on_cpus(pool: PoolSpec) -> bool:
    return pool.engine.kind == "vllm" and not pool.reserved_gpus
