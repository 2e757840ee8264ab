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
        ({"kv": replace(KV, tensor_parallel_size=2)}, "kv.tensor_parallel_size: 2 != 1 (decode/d-0)"),
        ({"model": "n"}, "model: n != m (router)"),
        ({"tokenizer_digest": "u" * 64}, "tokenizer_digest: " + "u" * 16 + " != " + "t" * 16 + " (router)"),
        ({"protocol_version": 9}, f"protocol_version: 9 != {PROTOCOL_VERSION} (router)"),
        ({"hash_version": 9}, f"hash_version: 9 != {HASH_VERSION} (router)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_worker_that_differs_is_refused_and_the_peer_is_named(changed: dict[str, Any], shown: str) -> None:
    assert conflicts(replace(CANDIDATE, **changed), PEER) == [shown]


def test_one_peer_is_enough_to_say_why_and_the_worker_itself_is_none() -> None:
    other = replace(PEER, worker_id="d-1")
    assert len(conflicts(replace(CANDIDATE, revision="v2"), PEER, other)) == 1
    assert conflicts(replace(CANDIDATE, revision="v2"), CANDIDATE) == []
