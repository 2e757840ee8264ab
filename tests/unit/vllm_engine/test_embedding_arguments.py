"""vLLM's arguments for a pool of role embed."""

from __future__ import annotations

from typing import Any

from kvasir.config.load.loader import loads
from kvasir_workers.engines.vllm.embedding import embedding_arguments

SPEC = """
models: [{name: vectors, max_model_len: 128}]
tiers: {cpu: {bytes: 1048576}}
pools: [{name: p, role: prefill}, {name: d, role: decode}, {name: v, role: embed, model: vectors}]
"""


def arguments(*changes: str) -> dict[str, Any]:
    view = loads(SPEC, "t.yaml", changes).view_of("v")
    return embedding_arguments(view, view.pool("v"), model_path="/m", platform="cpu")


def test_the_engine_pools_and_hands_nothing_over() -> None:
    made = arguments()
    assert (made["runner"], made["convert"]) == ("pooling", "embed")
    assert (made["served_model_name"], made["max_model_len"]) == ("vectors", 128)
    assert "kv_transfer_config" not in made
    assert "kv_events_config" not in made


def test_caching_and_chunking_are_left_to_the_model_unless_the_spec_forbids_them() -> None:
    made = arguments()
    assert made["enable_prefix_caching"] is made["enable_chunked_prefill"] is None
    off = ["pools.v.engine.prefix_caching=false", "pools.v.engine.chunked_prefill=false"]
    made = arguments(*off)
    assert made["enable_prefix_caching"] is made["enable_chunked_prefill"] is False
