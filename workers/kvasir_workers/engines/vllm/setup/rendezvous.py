"""How the nodes of one engine keep everybody else out of their connections."""

from __future__ import annotations

from collections.abc import Mapping

from kvasir.config.spec.deployment import PoolSpec
from kvasir.core.errors import ConfigError
from kvasir_workers.engines.nodes import NodePlace
from kvasir_workers.engines.signing.signed_tcp import ACCEPT, cannot_sign, is_loaded, signing_variables


def rendezvous_variables(
    pool: PoolSpec, place: NodePlace | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables with which processes that this one starts sign the connections of an engine of
    `pool`; `place` is None for an engine on one node. Raise ConfigError if they cannot."""
    if place is None or pool.engine.unauthenticated_rendezvous:
        return {}
    at = f"pools.{pool.name}.engine.nodes: connections between the nodes are signed, and"
    if problem := cannot_sign():
        raise ConfigError(f"{at} {': '.join(problem)}")
    if pool.engine.data_parallel_size > 1 and place.rank == 0 and not is_loaded():
        # The front, which listens for the cores of other nodes, is in this process.
        raise ConfigError(
            f"{at} this process was started without the library that signs them: see Ray's log of it for an "
            f"error of LD_PRELOAD; or, {ACCEPT}"
        )
    return signing_variables(place.key, environ)
