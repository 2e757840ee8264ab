"""Names of the transfer figures that the connector reports with an engine's step statistics.

They travel in `SchedulerStats.kv_connector_stats`, a plain dict, and the engine adapter turns them into
an EngineLoad. Counters are increments since the previous report; `BLOCKS_LEASED` is a level. A step in
which nothing changed carries no dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BYTES_RECEIVED = "kvasir_transfer_bytes_received"
TRANSFERS_RECEIVED = "kvasir_transfers_received"
TRANSFERS_FAILED = "kvasir_transfers_failed"
BLOCKS_LEASED = "kvasir_kv_blocks_leased"

COUNTERS = (BYTES_RECEIVED, TRANSFERS_RECEIVED, TRANSFERS_FAILED)


@dataclass(slots=True)
class TransferTotals:
    """The reports of one engine, summed: what EngineLoad's transfer fields hold."""

    bytes_received: int = 0
    transfers_received: int = 0
    transfers_failed: int = 0
    blocks_leased: int = 0

    def add(self, report: Mapping[str, Any]) -> None:
        """Take one step's dict in."""
        self.bytes_received += int(report.get(BYTES_RECEIVED, 0))
        self.transfers_received += int(report.get(TRANSFERS_RECEIVED, 0))
        self.transfers_failed += int(report.get(TRANSFERS_FAILED, 0))
        self.blocks_leased = int(report.get(BLOCKS_LEASED, self.blocks_leased))
