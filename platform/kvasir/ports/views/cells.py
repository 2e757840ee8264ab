"""What a router says of the cells of a deployment over several regions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CellModelView:
    """A model at one revision in a cell: `ready` workers, the expected wait for them, KV that is free on all
    of them together, prompt tokens that one computes in a second (0: not measured), and the price of a
    million tokens (0: unknown)."""

    model: str
    revision: str
    ready: int
    queue_s: float
    kv_free_tokens: int
    prefill_tokens_per_s: float
    price_per_mtok: float


@dataclass(frozen=True, slots=True)
class CellView:
    """A cell as this one sees it. `state`: here, fresh, stale, returning, lost, or unreachable if there is no
    link; `reason` says why it gets no requests. `age_s` is that of its last report, `network_s` the round
    trip, each None if unknown. `in_flight` requests of this cell run there, and `received` of other cells
    here. `sent` counts requests by the reason of the choice, `lost` those that were there when it was
    lost, and `failures`, of this cell, the steps of keeping its links that failed."""

    cell: str
    state: str
    reason: str = ""
    age_s: float | None = None
    network_s: float | None = None
    models: tuple[CellModelView, ...] = ()
    draining: bool = False
    in_flight: int = 0
    received: int = 0
    sent: Mapping[str, int] = field(default_factory=dict)
    lost: int = 0
    failures: int = 0
