"""Translates pools of the deployment spec into what the arithmetic needs."""

from __future__ import annotations

from kvasir.config.load.support import adapter_slots
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.sizing.fit import RankMemory
from kvasir.sizing.shape import EngineShape


def shape_of(view: Deployment, pool: PoolSpec, *, max_model_len: int) -> EngineShape:
    """Return the shape of an engine of `pool`, which serves the model of `view`."""
    engine = pool.engine
    # On a GPU vLLM schedules a batch while the one before it runs; stages of a pipeline have one each.
    in_flight = max(2 if pool.reserved_gpus else 1, engine.pipeline_parallel_size)
    slots = adapter_slots(view)
    return EngineShape(
        max_model_len=max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=engine.block_size,
        tensor=engine.tensor_parallel_size,
        pipeline=engine.pipeline_parallel_size,
        data=engine.data_parallel_size,
        expert_parallel=engine.expert_parallel,
        redundant_experts=0 if engine.eplb is None else engine.eplb.redundant_experts,
        dtype=view.model.dtype,
        kv_dtype=engine.kv_dtype,
        quantization=view.model.quantization,
        prefix_caching=engine.prefix_caching,
        keeps_windows=not view.moves_kv,
        steps_in_flight=in_flight,
        cuda_graphs=not engine.args.get("enforce_eager", False),
        adapters=0 if slots is None else slots.count,
        adapter_rank=0 if slots is None else slots.rank,
    )


def rank_memory(pool: PoolSpec, total: int) -> RankMemory:
    """Return the memory that a rank of `pool` may use of a GPU with `total` bytes."""
    engine = pool.engine
    if engine.kv_cache_bytes is None:
        return RankMemory(total, pool.gpu_utilization)
    share = pool.gpu_utilization / engine.gpu_memory_utilization
    return RankMemory(int(total * share), engine.gpu_memory_utilization, engine.kv_cache_bytes)
