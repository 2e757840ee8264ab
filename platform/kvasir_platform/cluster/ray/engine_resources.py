"""The resources that Ray reserves for one replica: a bundle for each node of its engine, all or none; and the
GPUs of which it reserves them.

If two engines each held part of the resources, both would wait forever. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvasir.config.load.gpu_choice import reserved_gpus
from kvasir.config.spec.deployment import Deployment, EngineSpec, PoolSpec
from kvasir_platform.cluster.ray.pod_templates import follower_resource, pool_resource, template_resource
from kvasir_workers.engines.signing.signed_tcp import LIBRARY, PRELOAD_VARIABLE


def head_gpus(deployment: Deployment, present: int) -> int:
    """Return the GPUs that Ray counts on a machine with `present` of them: all, so that pools can grow and a
    changed replica starts beside the one that it replaces; none if no pool uses any."""
    reserved = math.ceil(reserved_gpus(deployment.pools))
    return max(reserved, present) if reserved else 0


def shares(pool: PoolSpec, template: str | None) -> list[dict[str, Any]]:
    """Return the actor options for each node, the replica's own first. `template` is the digest of the
    required pod template, "" if any will do, None if all nodes share a machine. A pod belongs to its node
    alone: Kubernetes has counted its cores."""
    nodes = pool.engine.nodes
    if template is None:
        return [{"num_cpus": pool.cpus, "num_gpus": pool.reserved_gpus}] * nodes
    of = {template_resource(template): 1} if template else {}
    places = [pool_resource(pool.name), *[follower_resource(pool.name)] * (nodes - 1)]
    return [{"num_cpus": 0, "num_gpus": pool.reserved_gpus, "resources": {place: 1} | of} for place in places]


def bundles(reserved: Sequence[dict[str, Any]]) -> list[dict[str, float]] | None:
    """Return the same as bundles of a placement group; None for one node, which needs no group."""
    if len(reserved) == 1:
        return None
    made = (
        {"CPU": each["num_cpus"], "GPU": each["num_gpus"], **each.get("resources", {})} for each in reserved
    )
    return [{name: amount for name, amount in bundle.items() if amount} for bundle in made]


def preloaded(engine: EngineSpec) -> dict[str, Any]:
    """Return the actor options with which the process of a replica signs its own connections to other nodes:
    those of the front of data-parallel ranks. Other processes of an engine are started later, by vLLM."""
    if engine.nodes == 1 or engine.data_parallel_size == 1 or engine.unauthenticated_rendezvous:
        return {}
    return {"runtime_env": {"env_vars": {PRELOAD_VARIABLE: str(LIBRARY)}}}
