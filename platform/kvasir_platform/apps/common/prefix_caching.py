"""Turns the prefix cache of a worker off where its engine would end because of it."""

from __future__ import annotations

from kvasir.checkpoint.model_config import read_model_config
from kvasir.config.checks.cpu_kernels import loses_prefixes
from kvasir.config.load.model_files import resolve_model
from kvasir.config.spec.deployment import Deployment


def with_possible_caching(view: Deployment, name: str) -> Deployment:
    """Return `view`, in which the pool `name` has no prefix cache if its engine runs on CPUs and cannot keep
    prefixes of the model there. Raises ConfigError if the model is not found."""
    pool = view.pool(name)
    if pool.engine.kind != "vllm" or pool.reserved_gpus or not pool.engine.prefix_caching:
        return view
    config = read_model_config(resolve_model(view.model.source, view.model.revision))
    if not loses_prefixes(config.architectures):
        return view
    changed = pool.model_copy(update={"engine": pool.engine.model_copy(update={"prefix_caching": False})})
    return view.model_copy(update={"pools": tuple(changed if each is pool else each for each in view.pools)})
