"""Estimated memory of a deployment, before it starts: an engine without enough memory is killed."""

from __future__ import annotations

from kvasir.config.load.model_support import served_length
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.sizing.adapters import adapter_bytes, adapter_copy_bytes
from kvasir.sizing.host import ENGINE_BYTES, SMALL_KV_BYTES, least_kv_bytes
from kvasir.sizing.pools import shape_of
from kvasir.sizing.weights import rank_weights
from kvasir_platform.cluster.preflight.machine_facts import MachineFacts, ModelProbe
from kvasir_platform.cluster.preflight.tiers import arena_bytes

MIB = 1 << 20
GIB = 1 << 30

# Resident memory, measured on Ray 2.60.
SIM_ENGINE_BYTES = 250_000_000
CLUSTER_BYTES = 700_000_000
ROUTER_BYTES = 250_000_000


def replica_bytes(deployment: Deployment, pool: PoolSpec, model: ModelProbe) -> int:
    """Return the estimated host memory of one replica of `pool`: weights in the dtype in which they are
    served, KV cache, adapters, tiers' memory, and the engine's processes. On a GPU, only the last three are
    on the host."""
    engine = pool.engine
    if engine.kind == "sim":
        return SIM_ENGINE_BYTES
    arenas = arena_bytes(deployment) * engine.data_parallel_size
    rank = ENGINE_BYTES + _copy_bytes(deployment, pool, model)
    if pool.reserved_gpus:
        return engine.ranks * rank + arenas
    weights = _weight_bytes(deployment, pool, model)
    return weights + engine.ranks * (_kv_bytes(deployment, pool, model) + rank) + arenas


def _weight_bytes(deployment: Deployment, pool: PoolSpec, model: ModelProbe) -> int:
    """Return the weights and the slots of adapters of all ranks of a replica."""
    if model.config is None:
        return 0
    # Weights do not depend on the length.
    shape = shape_of(deployment, pool, max_model_len=1)
    stages = rank_weights(model.config, model.weights, shape)
    adapters = adapter_bytes(model.config, model.weights, shape)
    return (sum(stages) + sum(adapters)) * pool.engine.tensor_parallel_size * pool.engine.data_parallel_size


def _copy_bytes(deployment: Deployment, pool: PoolSpec, model: ModelProbe) -> int:
    """Return what one rank keeps of adapters beside their slots, which are counted with the weights."""
    if model.config is None:
        return 0
    return adapter_copy_bytes(model.config, model.weights, shape_of(deployment, pool, max_model_len=1))


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
