"""A connector for which every block has the same 64-bit hash, while there is a file at the path in the
environment: the hash that routers use must not select bytes."""

from __future__ import annotations

import os
from array import array
from typing import Any

from kvasir.native import chain_hashes
from kvasir_workers.connector.connector import KvasirConnector
from kvasir_workers.connector.tiers import scheduler as tier_scheduler

__all__ = ["KvasirConnector"]
SWITCH = "KVASIR_TESTS_ONE_NAME"


def _chain_hashes(tokens: Any, block_size: int, root: int) -> array[int]:
    if os.path.exists(os.environ[SWITCH]):
        return array("Q", [7] * (len(tokens) // block_size))
    return chain_hashes(tokens, block_size, root)


vars(tier_scheduler)["chain_hashes"] = _chain_hashes
