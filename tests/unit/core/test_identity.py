"""Registration: every difference that would corrupt or lose KV is refused, with both sides shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvasir.core.identity import (
    HASH_VERSION,
    PROTOCOL_VERSION,
    KvLayout,
    WorkerIdentity,
    registration_conflicts,
)
from kvasir.core.requests import Role

KV = KvLayout(
    block_size=16, dtype="bfloat16", layout="NHD", layers=4, kv_heads=4, head_size=32, bytes_per_block=4096
)
PEER = WorkerIdentity(
    worker_id="d-0",
    epoch=1,
    pool="decode",
    role=Role.DECODE,
    model="m",
    revision="main",
    tokenizer_digest="t" * 64,
    max_model_len=4096,
    kv=KV,
    kv_blocks=100,
    engine="vllm",
    engine_version="1",
    transfer="nixl",
)
CANDIDATE = replace(PEER, worker_id="p-0", pool="prefill", role=Role.PREFILL)


def conflicts(candidate: WorkerIdentity, *peers: WorkerIdentity) -> list[str]:
    return registration_conflicts(candidate, model="m", tokenizer_digest="t" * 64, peers=peers)


def test_a_worker_like_its_peers_may_join() -> None:
    assert conflicts(CANDIDATE, PEER) == []
    assert conflicts(replace(CANDIDATE, kv_blocks=7, max_model_len=128), PEER) == []


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({"revision": "v2"}, "revision: v2 != main (decode/d-0)"),
        ({"transfer": ""}, "transfer: '' != 'nixl' (decode/d-0)"),
        ({"kv": replace(KV, block_size=32)}, "kv.block_size: 32 != 16 (decode/d-0)"),
        ({"kv": replace(KV, dtype="fp8")}, "kv.dtype: fp8 != bfloat16 (decode/d-0)"),
        ({"kv": replace(KV, layout="HND")}, "kv.layout: HND != NHD (decode/d-0)"),
        ({"kv": replace(KV, bytes_per_block=1)}, "kv.bytes_per_block: 1 != 4096 (decode/d-0)"),
        ({"model": "n"}, "model: n != m (router)"),
        ({"tokenizer_digest": "u" * 64}, "tokenizer_digest: " + "u" * 16 + " != " + "t" * 16 + " (router)"),
        ({"protocol_version": 9}, f"protocol_version: 9 != {PROTOCOL_VERSION} (router)"),
        ({"hash_version": 9}, f"hash_version: 9 != {HASH_VERSION} (router)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_worker_that_differs_is_refused_and_the_peer_is_named(changed: dict[str, Any], shown: str) -> None:
    assert conflicts(replace(CANDIDATE, **changed), PEER) == [shown]


SPLIT = replace(KV, layout="Full:16x64:BHNC")
"""Heads outermost: ranks of another number find theirs in one piece."""


def ranks(layout: KvLayout, size: int) -> KvLayout:
    """The layout of one of `size` ranks that share the heads of `layout`."""
    return replace(
        layout,
        kv_heads=layout.kv_heads // size,
        bytes_per_block=layout.bytes_per_block // size,
        tensor_parallel_size=size,
    )


@pytest.mark.parametrize(("mine", "theirs"), [(1, 2), (2, 1), (4, 2), (1, 4)])
def test_tensor_parallel_sizes_may_differ_where_heads_lie_outermost(mine: int, theirs: int) -> None:
    assert ranks(SPLIT, mine).differences(ranks(SPLIT, theirs)) == []


@pytest.mark.parametrize(
    ("mine", "theirs", "shown"),
    [
        (ranks(KV, 2), KV, "KV heads are not outermost within a block (layout NHD); choose equal sizes"),
        (
            ranks(replace(SPLIT, kv_heads=6), 2),
            ranks(replace(SPLIT, kv_heads=6), 3),
            "neither divides the other",
        ),
        (replace(SPLIT, tensor_parallel_size=2), SPLIT, "kv_heads: 8 != 4"),
        (
            replace(SPLIT, kv_heads=1, tensor_parallel_size=4),
            replace(SPLIT, kv_heads=1),
            "cannot be split evenly",
        ),
        (
            ranks(SPLIT, 2),
            replace(SPLIT, layout="Full:16x64:BNHC"),
            "layout: Full:16x64:BHNC != Full:16x64:BNHC",
        ),
        (ranks(SPLIT, 2), replace(SPLIT, dtype="fp8"), "dtype: bfloat16 != fp8"),
    ],
)
def test_tensor_parallel_sizes_that_cannot_exchange_kv_are_refused_with_the_reason(
    mine: KvLayout, theirs: KvLayout, shown: str
) -> None:
    assert any(shown in difference for difference in mine.differences(theirs))
    assert theirs.differences(mine)


def test_one_peer_is_enough_to_say_why_and_the_worker_itself_is_none() -> None:
    other = replace(PEER, worker_id="d-1")
    assert len(conflicts(replace(CANDIDATE, revision="v2"), PEER, other)) == 1
    assert conflicts(replace(CANDIDATE, revision="v2"), CANDIDATE) == []
