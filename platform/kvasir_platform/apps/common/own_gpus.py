"""The GPUs of a worker that is a process of its own, where the spec leaves their number open.

Under Ray `kvasir up` decides for all pools of the machine; this worker has every GPU that it sees.
"""

from __future__ import annotations

from kvasir.config.load.gpu_choice import with_chosen_gpus
from kvasir.config.load.support import Platform
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError


def with_own_gpus(deployment: Deployment, name: str, *, present: int, platform: Platform) -> Deployment:
    """Return the deployment with a number of GPUs for the pool `name`, of which one worker runs with
    `present` GPUs. Raises ConfigError if there is none for an engine that computes on GPUs."""
    pool = deployment.pool(name)
    alone = pool.model_copy(update={"replicas": 1, "scaling": None})
    choice = with_chosen_gpus(
        deployment.model_copy(update={"pools": (alone,)}), present=present, platform=platform
    )
    if choice.missing:
        raise ConfigError(f"{choice.missing}; run it where the GPUs are, or install vLLM's build for CPUs")
    chosen = pool.model_copy(update={"gpus": choice.deployment.pools[0].gpus})
    pools = tuple(chosen if each is pool else each for each in deployment.pools)
    return deployment.model_copy(update={"pools": pools})
