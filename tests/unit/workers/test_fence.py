"""Which replicas may serve beside running ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.kit.engines.stub_engine import IDENTITY

from kvasir.core.identity import HASH_VERSION, PROTOCOL_VERSION, KvLayout, WorkerIdentity
from kvasir.core.requests import Role
from kvasir_workers.pool.fence import fence_conflicts, fence_of


def test_another_pool_process_or_size_may_join() -> None:
    other = replace(IDENTITY, worker_id="x", epoch=2, pool="prefill", role=Role.PREFILL, kv_blocks=99)
    assert fence_conflicts(fence_of(other), fence_of(IDENTITY)) == []


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            replace(IDENTITY, protocol_version=PROTOCOL_VERSION + 1),
            f"protocol_version: {PROTOCOL_VERSION + 1} != {PROTOCOL_VERSION}",
        ),
        (
            replace(IDENTITY, hash_version=HASH_VERSION + 1),
            f"hash_version: {HASH_VERSION + 1} != {HASH_VERSION}",
        ),
        (replace(IDENTITY, tokenizer_digest="another"), "tokenizer_digest: another != digest"),
        (replace(IDENTITY, revision="next"), "revision: next != main"),
        (replace(IDENTITY, transfer="nixl"), "transfer: nixl != "),
        (replace(IDENTITY, kv=replace(IDENTITY.kv, block_size=64)), "kv.block_size: 64 != 32"),
    ],
)
def test_what_routers_would_refuse_may_not(other: WorkerIdentity, told: str) -> None:
    assert fence_conflicts(fence_of(other), fence_of(IDENTITY)) == [told]


def test_ranks_of_another_number_may_join_where_they_read_each_other_s_blocks() -> None:
    whole = replace(IDENTITY.kv, kv_heads=4, bytes_per_block=8192, layout="Attention:BHNC")
    half = replace(whole, kv_heads=2, bytes_per_block=4096, tensor_parallel_size=2)

    def conflicts(mine: KvLayout, first: KvLayout) -> list[str]:
        return fence_conflicts(fence_of(replace(IDENTITY, kv=mine)), fence_of(replace(IDENTITY, kv=first)))

    assert conflicts(half, whole) == []
    (told,) = conflicts(*(replace(each, layout="Attention:BNHC") for each in (half, whole)))
    assert told.startswith("kv.tensor_parallel_size: 2 != 1, and KV heads are not outermost")


def test_a_field_that_only_one_version_knows_is_a_conflict() -> None:
    assert fence_conflicts({"a": 1, "new": 2}, {"a": 1, "old": 3}) == ["old: None != 3", "new: 2 != None"]
