"""A connector for which every block has the same 64-bit hash: the hash that routers use must not select
bytes."""

from __future__ import annotations

from array import array
from typing import Any

from kvasir_workers.connector.connector import KvasirConnector
from kvasir_workers.connector.tiers import scheduler as tier_scheduler

__all__ = ["KvasirConnector"]


def _one_name(tokens: Any, block_size: int, root: int) -> array[int]:
    return array("Q", [7] * (len(tokens) // block_size))


vars(tier_scheduler)["chain_hashes"] = _one_name
