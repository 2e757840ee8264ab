"""Names of the transfer and tier statistics that the connector reports with an engine's step statistics.

They are sent in `SchedulerStats.kv_connector_stats`, a plain dict, and the engine adapter converts them to an
EngineLoad. Counters are increments since the previous report; the others are levels. A step without changes
has no dict.

`EARLY_HANDOFFS` maps requests, by the engine's own id, to the hand-off that their output will have at its
end: their KV can be pulled while it is computed. Each is reported once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgspec

from kvasir.core.kv import TierLoad

BYTES_RECEIVED = "kvasir_transfer_bytes_received"
TRANSFERS_RECEIVED = "kvasir_transfers_received"
TRANSFERS_FAILED = "kvasir_transfers_failed"
PEERS_REFUSED = "kvasir_transfer_peers_refused"
BLOCKS_LEASED = "kvasir_kv_blocks_leased"
EARLY_HANDOFFS = "kvasir_early_handoffs"

COUNTERS = (BYTES_RECEIVED, TRANSFERS_RECEIVED, TRANSFERS_FAILED, PEERS_REFUSED)

SWAPPED_IN = "kvasir_swapped_in"
RECOMPUTED = "kvasir_recomputed"
TIERS = "kvasir_tiers"

TIER_COUNTERS = (SWAPPED_IN, RECOMPUTED)


@dataclass(slots=True)
class TransferTotals:
    """The reports of one engine, summed: the transfer and tier fields of EngineLoad."""

    bytes_received: int = 0
    transfers_received: int = 0
    transfers_failed: int = 0
    transfer_peers_refused: int = 0
    blocks_leased: int = 0
    swapped_in: int = 0
    recomputed: int = 0
    tiers: tuple[TierLoad, ...] = ()

    def add(self, report: Mapping[str, Any]) -> None:
        """Add one step's dict."""
        self.bytes_received += int(report.get(BYTES_RECEIVED, 0))
        self.transfers_received += int(report.get(TRANSFERS_RECEIVED, 0))
        self.transfers_failed += int(report.get(TRANSFERS_FAILED, 0))
        self.transfer_peers_refused += int(report.get(PEERS_REFUSED, 0))
        self.blocks_leased = int(report.get(BLOCKS_LEASED, self.blocks_leased))
        self.swapped_in += int(report.get(SWAPPED_IN, 0))
        self.recomputed += int(report.get(RECOMPUTED, 0))
        if TIERS in report:
            self.tiers = tuple(msgspec.convert(tier, TierLoad) for tier in report[TIERS])


def tier_as_dict(load: TierLoad) -> dict[str, Any]:
    """Return the plain data that `TransferTotals` reads."""
    return {**asdict(load), "medium": int(load.medium)}


def all_ranks(tiers: Iterable[TierLoad]) -> tuple[TierLoad, ...]:
    """Return the tiers of an engine's data-parallel ranks combined, fastest first. A problem on one rank is a
    problem of the engine."""
    found: dict[int, TierLoad] = {}
    for tier in tiers:
        before = found.get(tier.medium)
        found[tier.medium] = tier if before is None else _together(before, tier)
    return tuple(found[medium] for medium in sorted(found))


def _together(one: TierLoad, other: TierLoad) -> TierLoad:
    values = {field.name: getattr(one, field.name) for field in fields(TierLoad)}
    for name, value in values.items():
        if name not in {"medium", "trouble", "readable"}:
            values[name] = value + getattr(other, name)
    values["trouble"] = one.trouble or other.trouble
    values["readable"] = one.readable and other.readable
    return TierLoad(**values)
