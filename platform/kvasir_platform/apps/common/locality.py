"""The location of a worker, as its spec, its environment and its node say.

A pod cannot read the labels of its node. The chart puts labels of the pod, to which some are copied, into the
variables below; see docs/TOPOLOGY.md.
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
    node, zone, rack, domain = (_variable(environ, name) for name in (NODE, ZONE, RACK, NVLINK_DOMAIN))
    return pool.topology.locality.completed(Locality(node, zone, rack, domain, nics))


def _variable(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "").strip()
    if len(value) > MAX_NAME:
        raise ConfigError(
            f"the variable {name} has {len(value)} characters and names a place; it may have {MAX_NAME}. "
            "Set it to the value of a node label, or remove it"
        )
    return value
