"""How much of a machine's memory the KV of an engine on CPUs takes, if the spec does not say.

A CPU serves few requests at once, and its memory is shared with other processes. So KV takes at most half of
what a replica's share of the free memory has left after weights and the engine itself, and not more than some
requests of max_model_len need; but always enough for one, without which vLLM does not start.
"""

from __future__ import annotations

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.sizing.kv import kv_need
from kvasir.sizing.pools import shape_of

SMALL_KV_BYTES = 128 << 20
"""KV of a rank where nothing asks for more."""
ENGINE_BYTES = 1_700_000_000
"""Resident memory of one rank beside weights and KV, measured on vLLM 0.32 for the CPU."""
_LEAST_KV_BYTES = 1 << 20
"""For a model that keeps nothing, or of which nothing is known."""
_REQUESTS = 8
_SHARE = 0.5


def least_kv_bytes(view: Deployment, pool: PoolSpec, config: ModelConfig, *, max_model_len: int) -> int:
    """Return the KV bytes of a rank with which an engine on CPUs starts: those of one request."""
    need = kv_need(config, shape_of(view, pool, max_model_len=max_model_len))
    speculative = pool.engine.speculative
    # A draft has layers of its own, fewer than the model's.
    drafts = 2 if speculative is not None and speculative.keeps_kv else 1
    return max(need.request_bytes) * drafts


def host_kv_bytes(
    view: Deployment, pool: PoolSpec, config: ModelConfig, *, max_model_len: int, free: int, weights: int
) -> int:
    """Return the KV bytes of a rank of `pool` on CPUs. `free` is the rank's share of the machine's free
    memory and `weights` the rank's part of the weights and its slots of adapters, in bytes."""
    least = least_kv_bytes(view, pool, config, max_model_len=max_model_len)
    wanted = max(SMALL_KV_BYTES, least * min(_REQUESTS, pool.engine.max_num_seqs))
    return max(least, _LEAST_KV_BYTES, min(wanted, int((free - weights - ENGINE_BYTES) * _SHARE)))
