"""What Ray reserves for one replica: a place for each node of its engine, all of them or none.

Two engines that each held a part of the room would wait for each other's for ever. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvasir.config.spec.deployment import PoolSpec
from kvasir_platform.cluster.ray.pod_templates import follower_resource, pool_resource, template_resource


def shares(pool: PoolSpec, template: str | None) -> list[dict[str, Any]]:
    """For each node, the one of the replica first, as options of an actor. `template` is the digest of the
    pods that they must be in, "" where any will do, None where all share a machine. A pod is all its node's:
    Kubernetes has counted its cores."""
    nodes = pool.engine.nodes
    if template is None:
        return [{"num_cpus": pool.cpus, "num_gpus": pool.gpus}] * nodes
    of = {template_resource(template): 1} if template else {}
    places = [pool_resource(pool.name), *[follower_resource(pool.name)] * (nodes - 1)]
    return [{"num_cpus": 0, "num_gpus": pool.gpus, "resources": {place: 1} | of} for place in places]


def bundles(reserved: Sequence[dict[str, Any]]) -> list[dict[str, float]] | None:
    """The same as bundles of a placement group; None for one node, which needs no group."""
    if len(reserved) == 1:
        return None
    made = (
        {"CPU": each["num_cpus"], "GPU": each["num_gpus"], **each.get("resources", {})} for each in reserved
    )
    return [{name: amount for name, amount in bundle.items() if amount} for bundle in made]
