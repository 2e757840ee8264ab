"""The size of the KV cache on CPUs, where the spec leaves it open."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kit import public_models as models

from kvasir.config.load.loader import load
from kvasir.sizing.host import ENGINE_BYTES, SMALL_KV_BYTES, host_kv_bytes, least_kv_bytes

GIB = 1 << 30
MIB = 1 << 20
ONE_REQUEST = 4096 * (128 << 10)
TINY = models.LLAMA_8B | {
    "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4,
}  # fmt: skip


def size(values: dict[str, Any], free: int, *overrides: str, weights: int = 0) -> int:
    view = load(None, overrides)
    return host_kv_bytes(
        view, view.pools[0], models.config_of(values), max_model_len=4096, free=free, weights=weights
    )


def test_a_small_model_takes_128_mib_however_much_is_free() -> None:
    assert size(TINY, 64 * GIB) == size(TINY, 1024 * GIB) == SMALL_KV_BYTES == 128 * MIB


def test_a_larger_model_has_room_for_eight_long_requests() -> None:
    assert size(models.LLAMA_8B, 64 * GIB) == 8 * ONE_REQUEST


def test_a_batch_of_fewer_requests_has_less() -> None:
    assert size(models.LLAMA_8B, 64 * GIB, "pools.prefill.engine.max_num_seqs=3") == 3 * ONE_REQUEST


def test_it_takes_at_most_half_of_what_weights_and_engine_leave() -> None:
    assert size(models.LLAMA_8B, 20 * GIB + ENGINE_BYTES, weights=16 * GIB) == 2 * GIB


@pytest.mark.parametrize("free", [0, 17 * GIB])
def test_it_always_holds_one_request_because_vllm_does_not_start_without(free: int) -> None:
    assert size(models.LLAMA_8B, free, weights=16 * GIB) == ONE_REQUEST


def test_a_model_that_keeps_nothing_has_a_size_that_the_engine_accepts() -> None:
    assert size({"model_type": "bert"}, 0) == MIB


def test_a_draft_with_layers_of_its_own_needs_kv_too() -> None:
    plain = load(None)
    drafted = load(None, ["pools.prefill.engine.speculative={method: draft_model, model: /d}"])
    least = [
        least_kv_bytes(view, view.pools[0], models.config_of(models.LLAMA_8B), max_model_len=4096)
        for view in (plain, drafted)
    ]
    assert least == [ONE_REQUEST, 2 * ONE_REQUEST]
