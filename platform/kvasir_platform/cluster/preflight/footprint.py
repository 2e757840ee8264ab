"""Estimated memory of a deployment, before it starts: an engine without enough memory is killed."""

from __future__ import annotations

from kvasir.config.load.model_support import served_length
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.sizing.host import ENGINE_BYTES, SMALL_KV_BYTES, least_kv_bytes
from kvasir_platform.cluster.preflight.machine_facts import MachineFacts, ModelProbe
from kvasir_platform.cluster.preflight.tiers import arena_bytes

MIB = 1 << 20
GIB = 1 << 30

# Resident memory, measured on Ray 2.60.
SIM_ENGINE_BYTES = 250_000_000
CLUSTER_BYTES = 700_000_000
ROUTER_BYTES = 250_000_000

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def replica_bytes(deployment: Deployment, pool: PoolSpec, model: ModelProbe) -> int:
    """Return the estimated host memory of one replica of `pool`: weights in the dtype in which they are
    served, KV cache, tiers' memory, and the engine's processes. On a GPU, only the last two are on the host.
    """
    engine = pool.engine
    if engine.kind == "sim":
        return SIM_ENGINE_BYTES
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    processes = ranks * engine.data_parallel_size
    arenas = arena_bytes(deployment) * engine.data_parallel_size
    if pool.gpus:
        return processes * ENGINE_BYTES + arenas
    stored = _DTYPE_BYTES.get(model.weight_dtype, 2)
    served = _DTYPE_BYTES.get(deployment.model.dtype, stored)
    weights = model.weight_bytes * served // stored * engine.data_parallel_size
    return weights + processes * (_kv_bytes(deployment, pool, model) + ENGINE_BYTES) + arenas


def _kv_bytes(deployment: Deployment, pool: PoolSpec, model: ModelProbe) -> int:
    """Return the KV of one rank: the spec's, or the least with which an engine starts, because it takes more
    only where there is more."""
    if pool.engine.kv_cache_bytes is not None:
        return pool.engine.kv_cache_bytes
    length = None if model.config is None else served_length(deployment, model.config)
    if model.config is None or length is None:
        return SMALL_KV_BYTES
    return max(SMALL_KV_BYTES, least_kv_bytes(deployment, pool, model.config, max_model_len=length))


def needed_bytes(deployment: Deployment, machine: MachineFacts) -> int:
    """Return the estimated host memory of the whole deployment."""
    pools = sum(
        pool.most * replica_bytes(view, pool, machine.model_of(view))
        for view in deployment.views()
        for pool in view.pools
    )
    return pools + CLUSTER_BYTES + ROUTER_BYTES


def size_text(count: int) -> str:
    """Return `count` bytes in MiB or GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
