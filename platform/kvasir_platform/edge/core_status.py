"""The router status that the core pushes to each edge, on change and at a limited rate."""

from __future__ import annotations

from collections.abc import Mapping

from kvasir.ports.router import RequestPort
from kvasir_platform.edge.frames import CoreStatus

TELL_S = 0.05
"""How old an edge's view may be."""


def core_status_of(router: RequestPort, shares: Mapping[str, float]) -> CoreStatus:
    """Return the current status. `shares` are those of canaries, by route."""
    models = router.not_ready_models()
    brownouts = {model: router.brownout(model) for model in models}
    return CoreStatus(
        router.refusing_reason(),
        router.not_ready_reason(),
        models,
        {model: view for model, view in brownouts.items() if view.level},
        dict(router.adapters.served()),
        dict(shares),
    )
