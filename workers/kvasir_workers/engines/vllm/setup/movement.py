"""How the KV of a deployment's model is moved, decided before the engine starts."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kvasir.checkpoint.kv_movement import KvMovement, kv_movement
from kvasir.checkpoint.model_config import read_model_config
from kvasir.config.load.transfer_choice import UCX_TRANSPORTS, with_transfer
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError
from kvasir_workers.transfer.common.nics import rdma_ports

log = logging.getLogger(__name__)


def movement_of(deployment: Deployment, model_path: Path) -> KvMovement | None:
    """Return how the KV of the model in `model_path` is moved, None if the deployment moves none, and log
    what that costs. Raise ConfigError if the KV cannot be moved."""
    if not deployment.moves_kv:
        return None
    movement = kv_movement(read_model_config(model_path))
    if movement.obstacle:
        raise ConfigError(
            f"the KV of {deployment.model.name} cannot be moved between workers or tiers: "
            f"{movement.obstacle}; set disaggregation: never with pools of role both, and leave tiers out"
        )
    if movement.cost:
        log.info("%s: %s", deployment.model.name, movement.cost)
    return movement


def with_chosen_transfer(deployment: Deployment) -> Deployment:
    """Return the deployment with the transfer that this machine uses. Raise ConfigError if it may not run
    here (kvasir.config.load.transfer_choice)."""
    chosen = with_transfer(deployment, rdma=bool(rdma_ports()), ucx_tls=os.environ.get(UCX_TRANSPORTS))
    if chosen.transfer.kind != deployment.transfer.kind:
        log.info("transfer.kind: %s is %s here", deployment.transfer.kind, chosen.transfer.kind)
    return chosen
