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
from kvasir_router.index.ledger import PredictionLedger
from kvasir_router.index.survey import PrefixSurvey

__all__ = [
    "CancelSnapshot",
    "CatchUpLimits",
    "FetchSnapshot",
    "FleetIndex",
    "IndexEffect",
    "IndexMode",
    "IndexViewId",
    "PredictionLedger",
    "PrefixSurvey",
]
