"""Salts after a shared prefix, in the engine core: which of vLLM's block hashes a salt goes into.

vLLM puts a request's salt into the hash of its first block, on which all later hashes depend. If the tenants
of a deployment share prefixes, a salt names its place (`kvasir.native.salt_places`), and goes into the hash
of the block there, so that the blocks before it are those of every tenant of the prefix.

vLLM's structured output manager imports this module by name, in the place of `core_grammars`, which it
imports. These private parts of vLLM are used, and tests/contract/test_vllm_kv_events.py checks them:

    v1.core.kv_cache_utils.generate_block_hash_extra_keys   replaced here, and where it was imported:
    v1.core.block_pool.generate_block_hash_extra_keys
    Request.cache_salt
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core import block_pool, kv_cache_utils

from kvasir.native.salt_places import salt_place
from kvasir_workers.engines.vllm.output import core_grammars

TAG = "cache_salt"


def install() -> None:
    """Place the salts of all requests of this process. Idempotent."""
    core_grammars.install()
    for module in (kv_cache_utils, block_pool):
        if not isinstance(module.generate_block_hash_extra_keys, _Placed):
            module.generate_block_hash_extra_keys = _Placed(module.generate_block_hash_extra_keys)


class _Placed:
    """Replaces vLLM's function."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(
        self, request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
    ) -> tuple[tuple[Any, ...] | None, int]:
        keys, next_mm_idx = self._original(request, start_token_idx, end_token_idx, start_mm_idx)
        place = salt_place(request.cache_salt) if request.cache_salt else None
        if place is None:
            return keys, next_mm_idx
        placed = [key for key in keys or () if key[0] != TAG]
        if start_token_idx <= place.tokens < end_token_idx:
            placed.append((TAG, place.key))
        return tuple(placed) or None, next_mm_idx


install()
