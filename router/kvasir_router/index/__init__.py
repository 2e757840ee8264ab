"""The prefix index: which worker holds which prefix, over all KV caches of the fleet."""

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
