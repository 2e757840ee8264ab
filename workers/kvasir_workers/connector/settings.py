"""Configuration of the connector, from `kv_connector_extra_config`."""

from __future__ import annotations

from typing import Any

import msgspec


class Settings(msgspec.Struct, frozen=True):
    """`transfer` is "" if nothing is handed off; `ucx_tcp` lets UCX use TCP between machines; `lease_s`
    bounds every lease, `timeout_s` every pull without progress. `checksum_parts` is the number of checksums
    per offered block, 0 for none; `head_major` requests KV with heads outermost within a block, which ranks
    of another number can read; `stages` are the numbers of pipeline stages of engines that exchange KV, if
    they differ; `overlap` offers prompts before they are computed. `tiers` are the fields of
    kvasir.config.spec.tiers.TiersSpec, None without tiers; `model`, `revision` and `adapters` (folders by
    name) identify the KV."""

    transfer: str = ""
    host: str = "127.0.0.1"
    ucx_tcp: bool = False
    lease_s: float = 20.0
    timeout_s: float = 5.0
    checksum_parts: int = 1
    head_major: bool = False
    stages: tuple[int, ...] = ()
    overlap: bool = True
    tiers: dict[str, Any] | None = None
    model: str = ""
    revision: str = ""
    adapters: dict[str, str] = {}
