"""Checks whether the KV of a model can be moved as its deployment wants, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator

from kvasir.checkpoint.kv_movement import KvMovement, kv_movement
from kvasir.config.load.aggregated import must_disaggregate, served_whole
from kvasir.config.spec.deployment import Deployment
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.machine_facts import KnownModels, ModelProbe


def movement_findings(view: Deployment, model: ModelProbe) -> Iterator[Finding]:
    """Yield why the KV of the model of `view` cannot be moved, or what moving it costs."""
    movement = _movement(view, model)
    if movement is None:
        return
    name = view.model.name
    if movement.obstacle and view.disaggregated:
        yield Finding(
            "kv",
            "error",
            f"disaggregation is {view.disaggregation}, and the KV of {name} cannot be moved: "
            f"{movement.obstacle}",
            "set disaggregation: never, with pools of role both",
        )
    elif movement.obstacle:
        yield Finding(
            "kv",
            "error",
            f"tiers are configured, and the KV of {name} cannot be moved: {movement.obstacle}",
            "leave tiers out",
        )
    elif movement.cost:
        yield Finding("kv", "ok", f"{name}: {movement.cost}")


def whole_where_needed(deployment: Deployment, models: KnownModels) -> tuple[Deployment, list[Finding]]:
    """Return the deployment with the models served whole whose KV cannot be moved, unless it demands
    otherwise; and a finding for each of them."""
    found = {}
    for view in deployment.views():
        movement = _movement(view, models.model_of(view))
        if movement is None or not movement.obstacle or not view.disaggregated:
            continue
        if not must_disaggregate(deployment, view.model.name):
            found[view.model.name] = Finding(
                "kv",
                "warning",
                f"{view.model.name} is served aggregated, since its KV cannot be moved: {movement.obstacle}",
                "set disaggregation: never with pools of role both, to state it",
            )
    if not found:
        return deployment, []
    return served_whole(deployment, found), list(found.values())


def _movement(view: Deployment, model: ModelProbe) -> KvMovement | None:
    """Return None if no KV is moved, or if the model's configuration is not known yet."""
    real = any(pool.engine.kind == "vllm" for pool in view.pools)
    if model.config is None or view.embeds or not view.moves_kv or not real:
        return None
    return kv_movement(model.config)
