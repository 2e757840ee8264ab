"""The location of a worker, as its spec, its environment and its node say.

A pod cannot read the labels of its node. Kubernetes copies some of them to the pod, from where the chart puts
them into the variables below; see docs/TOPOLOGY.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvasir.config.spec.deployment import PoolSpec
from kvasir.core.errors import ConfigError
from kvasir.core.locality import MAX_NAME, Locality, Nic

NODE, ZONE, RACK, NVLINK_DOMAIN = "KVASIR_NODE", "KVASIR_ZONE", "KVASIR_RACK", "KVASIR_NVLINK_DOMAIN"


def locality_of(pool: PoolSpec, environ: Mapping[str, str], nics: tuple[Nic, ...]) -> Locality:
    """Return the location of a worker of that pool. The spec takes precedence over the environment. Raises
    ConfigError for a variable with too long a value."""
    declared = pool.topology
    return Locality(
        node=_variable(environ, NODE),
        zone=declared.zone or _variable(environ, ZONE),
        rack=declared.rack or _variable(environ, RACK),
        nvlink_domain=declared.nvlink_domain or _variable(environ, NVLINK_DOMAIN),
        nics=nics,
    )


def _variable(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "").strip()
    if len(value) > MAX_NAME:
        raise ConfigError(
            f"the variable {name} has {len(value)} characters and names a place; it may have {MAX_NAME}. "
            "Set it to the value of a node label, or remove it"
        )
    return value
