"""What the connector is told by whoever starts the engine: `kv_connector_extra_config`."""

from __future__ import annotations

from typing import Any

import msgspec


class Settings(msgspec.Struct, frozen=True):
    """`transfer` is "" where nothing is handed over; `lease_s` bounds every
    lease, `timeout_s` every pull that makes no progress. `checksum_parts` sums are given for each block that
    is offered, 0 for none; `head_major` asks for KV whose heads lie outermost within a block, which ranks of
    another number can read; `overlap` offers prompts before they are computed. `tiers` are the fields of
    kvasir.config.spec.tiers.TiersSpec, None without tiers; `model`, `revision` and `adapters` (folders by
    name) say whose KV it is."""

    transfer: str = ""
    host: str = "127.0.0.1"
    lease_s: float = 20.0
    timeout_s: float = 5.0
    checksum_parts: int = 1
    head_major: bool = False
    overlap: bool = True
    tiers: dict[str, Any] | None = None
    model: str = ""
    revision: str = ""
    adapters: dict[str, str] = {}
