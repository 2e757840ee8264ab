"""A follower node of an engine: the code that a replica's further actors in Ray run.

It has no session and no gRPC server: routers connect to the engine's first node only.
"""

from __future__ import annotations

import os
from dataclasses import replace

from kvasir.config.load.model_files import resolve_model
from kvasir.config.load.model_parsers import resolved
from kvasir.config.load.transfer_choice import chosen_kind
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError
from kvasir.telemetry.logs import configure_logging
from kvasir_platform.apps.common.kv_size import with_kv_size
from kvasir_platform.apps.common.pod import POD, at_pod
from kvasir_platform.apps.common.prefix_caching import with_possible_caching
from kvasir_platform.apps.common.weight_reading import with_strategy
from kvasir_platform.apps.worker_node import worker_view
from kvasir_platform.cluster.preflight.cpus import usable_cpus
from kvasir_platform.cluster.preflight.host_memory import available_memory
from kvasir_workers.engines.nodes import NodePlace, leading
from kvasir_workers.pool.followers import NodePlan
from kvasir_workers.transfer.common.nics import rdma_ports

_EVERY_ADDRESS = {"0.0.0.0", "::"}  # noqa: S104 - compared with, not bound


def lead(deployment: Deployment) -> NodePlace:
    """Return the position of an engine's first node, in this process
    (kvasir_workers.pool.followers.NodePlan). Raises ConfigError if the spec names no address at which other
    nodes could reach it."""
    kind = chosen_kind(at_pod(deployment, os.environ).transfer, rdma=bool(rdma_ports()))
    return replace(leading(_address(deployment)), transfer=kind)


async def follow(deployment: Deployment, pool_name: str, rank: int, leader: NodePlace) -> str:
    """Run the ranks of a follower node. Return why they ended (kvasir_workers.pool.followers.NodePlan).
    Raises ConfigError if they do not start."""
    configure_logging(deployment.telemetry.log_level)
    place = replace(leader, rank=rank, address=_address(deployment))
    alone = deployment.worker.host == POD
    whole = at_pod(deployment, os.environ)
    view = worker_view(whole, pool_name, max(1, int(usable_cpus())), alone=alone)
    free = available_memory()[0]
    view = with_possible_caching(view, pool_name)
    view = with_kv_size(whole, view, pool_name, free=free, alone=alone)
    view = with_strategy(view, pool_name, free=free)
    from kvasir_workers.engines.vllm.follower import follow as follow_vllm

    folder = resolve_model(view.model.source, view.model.revision)
    view = resolved(view, folder)
    return await follow_vllm(view, view.pool(pool_name), place, model_path=str(folder))


def _address(deployment: Deployment) -> str:
    host = at_pod(deployment, os.environ).worker.host
    if host in _EVERY_ADDRESS:
        raise ConfigError(
            f"worker.host: the nodes of one engine need an address, and {host} means every address; "
            f"name one, or set {POD}"
        )
    return host


NODES = NodePlan(follow=follow, lead=lead)
"""Return how an engine of several nodes gets its nodes, wherever Ray runs."""
