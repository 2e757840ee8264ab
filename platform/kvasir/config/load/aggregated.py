"""A deployment whose models are served whole where their KV cannot be handed over."""

from __future__ import annotations

from collections.abc import Container

from kvasir.config.spec.deployment import Deployment
from kvasir.core.requests import Role


def must_disaggregate(deployment: Deployment, name: str) -> bool:
    """Return whether the spec demands that the model of this name is disaggregated, by `always` in the file
    or in an option. The default is `always` too, and demands nothing."""
    for each in deployment.models:
        if each.name == name and each.disaggregation is not None:
            return each.disaggregation == "always"
    return deployment.disaggregation == "always" and "disaggregation" in deployment.model_fields_set


def served_whole(deployment: Deployment, names: Container[str]) -> Deployment:
    """Return the deployment with `disaggregation: never` for the models of these names, and role both for
    their pools. Pools that the spec does not state become one."""
    if "pools" not in deployment.model_fields_set:
        default = Deployment(disaggregation="never")
        return deployment.model_copy(update={"disaggregation": "never", "pools": default.pools})
    first = deployment.model.name
    pools = tuple(
        pool.model_copy(update={"role": Role.BOTH}) if (pool.model or first) in names else pool
        for pool in deployment.pools
    )
    models = tuple(
        each.model_copy(
            update={
                "disaggregation": "never"
                if each.name in names
                else each.disaggregation or deployment.disaggregation
            }
        )
        for each in deployment.models
    )
    update: dict[str, object] = {"pools": pools, "models": models}
    if first in names:
        update["disaggregation"] = "never"
    return deployment.model_copy(update=update)
