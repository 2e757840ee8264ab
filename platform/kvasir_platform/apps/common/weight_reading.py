"""How a worker reads weights, where the spec leaves it open: by the memory that is free where it starts."""

from __future__ import annotations

from typing import Literal

from kvasir.checkpoint.tensors import weight_files
from kvasir.config.load.model_files import resolve_model
from kvasir.config.load.model_support import needs_weights
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError

_SHARE = 0.9
"""Share of the free memory that prefetched weights may take."""


def with_strategy(view: Deployment, pool: str, *, free: int) -> Deployment:
    """Return `view`, a deployment of one model, with the strategy by which a worker of `pool` with `free`
    bytes of memory reads safetensors files. Unchanged if there are none, or the spec names a strategy. Raises
    ConfigError if the model is not found."""
    model = view.model
    if model.load.strategy != "auto" or not needs_weights(view):
        return view
    folder = resolve_model(model.source, model.revision)
    try:
        weights = sum(path.stat().st_size for path in weight_files(folder))
    except ConfigError:
        return view
    strategy = strategy_for(weights, free, on_cpu=view.pool(pool).reserved_gpus == 0)
    loading = model.load.model_copy(update={"strategy": strategy})
    return view.model_copy(update={"model": model.model_copy(update={"load": loading})})


def strategy_for(weights: int, free: int, *, on_cpu: bool) -> Literal["prefetch", "lazy"]:
    """Return `prefetch` if `weights` bytes of files fit into the page cache, beside the engine's own copy of
    them where it computes on CPUs. What does not fit would be evicted before it is used, and read again."""
    needed = 2 * weights if on_cpu else weights
    return "prefetch" if needed <= _SHARE * free else "lazy"
