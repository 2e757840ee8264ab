"""The part of an engine on a node other than the first: vLLM's ranks, without sessions.

vLLM starts its executor here as on the first node, and the ranks of all nodes connect through torch's store,
which the first node opens. They do not end when another node is lost: a rank waits for its next step
indefinitely. The caller has to end the process with the engine (kvasir_workers.pool.followers).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kvasir.checkpoint.kv_movement import KvMovement
from kvasir.checkpoint.media.rules import media_rules
from kvasir.config.load.model_support import served_classes
from kvasir.config.load.parallel_support import missing_kernels
from kvasir.config.load.support import unsupported_features
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.errors import ConfigError
from kvasir.core.media.prompts import MediaKind
from kvasir.core.requests import Role
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.engines.vllm.embedding import embedding_arguments
from kvasir_workers.engines.vllm.replica import (
    CACHE_FOLDER,
    served_weights,
    set_environment,
    with_draft,
)
from kvasir_workers.engines.vllm.setup.arguments import engine_arguments, log_level
from kvasir_workers.engines.vllm.setup.engine_errors import START_ERRORS, EngineErrors
from kvasir_workers.engines.vllm.setup.movement import movement_of, with_chosen_transfer


def follower_arguments(
    deployment: Deployment,
    pool: PoolSpec,
    *,
    model_path: str,
    platform: str,
    place: NodePlace,
    movement: KvMovement | None = None,
    classifies: bool = False,
    media: Collection[MediaKind] = (),
) -> dict[str, Any]:
    """Return the leader's arguments with another place: ranks must agree on all that shapes what they
    compute. Agents of the transfer serve at this node's `transfer.host`."""
    if pool.role is Role.EMBED:
        return embedding_arguments(
            deployment, pool, model_path=model_path, platform=platform, place=place, classifies=classifies
        )
    return engine_arguments(
        deployment,
        pool,
        model_path=model_path,
        platform=platform,
        movement=movement,
        place=place,
        media=media,
    )


async def follow(
    deployment: Deployment,
    pool: PoolSpec,
    place: NodePlace,
    *,
    model_path: str,
    cache_folder: Path = CACHE_FOLDER,
) -> str:
    """Run this node's ranks until one of them ends; return why that ends the engine. Raise ConfigError if
    they do not start; for an error of vLLM, it is an EngineStartError."""
    deployment = with_chosen_transfer(deployment)
    mine = deployment.transfer.kind
    if deployment.disaggregated and place.transfer not in ("", mine):
        raise ConfigError(
            f"transfer.kind: node {place.rank} of pool {pool.name} uses {mine}, and the engine's first node "
            f"{place.transfer}; give all nodes of an engine RDMA devices or none, or set transfer.kind: nccl"
        )
    errors = EngineErrors(log_level(deployment))
    await set_environment(deployment, pool, place, errors)
    from kvasir_workers.engines.vllm.runtime import follower_runtime

    platform = follower_runtime.platform()
    if reasons := unsupported_features(deployment, platform=platform) + missing_kernels((pool,)):
        raise ConfigError("\n".join(reasons))
    try:
        folder = await asyncio.to_thread(served_weights, deployment, Path(model_path), cache_folder)
        drafted = await asyncio.to_thread(with_draft, pool)
        arguments = follower_arguments(
            deployment,
            drafted,
            model_path=str(folder),
            platform=platform,
            place=place,
            movement=movement_of(deployment, Path(model_path)),
            classifies=served_classes(deployment, Path(model_path)) is not None,
            media=media_rules(Path(model_path)).placeholders,
        )
        await asyncio.to_thread(follower_runtime.run_ranks, arguments)
    except START_ERRORS as error:
        raise errors.start_error(error, pool.name, f"node {place.rank} of pool {pool.name}") from error
    finally:
        errors.close()
    return f"a rank of node {place.rank} ended"
