"""Which worker holds which prefix: the router's picture of every KV cache in the fleet."""

from kvasir_router.index.contract import (
    CancelSnapshot,
    CatchUpLimits,
    FetchSnapshot,
    IndexEffect,
    IndexMode,
    IndexViewId,
)
from kvasir_router.index.fleet_index import FleetIndex

__all__ = [
    "CancelSnapshot",
    "CatchUpLimits",
    "FetchSnapshot",
    "FleetIndex",
    "IndexEffect",
    "IndexMode",
    "IndexViewId",
]
