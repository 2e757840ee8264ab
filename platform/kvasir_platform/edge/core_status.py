"""What each edge should know of its router without asking: told when it changes, and not more often than it
can matter."""

from __future__ import annotations

from kvasir.ports.router import RequestPort
from kvasir_platform.edge.frames import CoreStatus

TELL_S = 0.05
"""How old an edge's view may be."""


def core_status_of(router: RequestPort) -> CoreStatus:
    """How things stand."""
    models = router.not_ready_models()
    brownouts = {model: router.brownout(model) for model in models}
    return CoreStatus(
        router.not_ready_reason(), models, {model: view for model, view in brownouts.items() if view.level}
    )
