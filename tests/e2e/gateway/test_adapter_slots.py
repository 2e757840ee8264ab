"""The memory of slots for LoRA adapters, against the tensors that vLLM alone makes for them.

`tests/contract/test_adapters_against_vllm.py` has further architectures.
"""

from __future__ import annotations

import pytest
from tests.kit.engines.vllm_reference import RANK, SLOTS, Reference

from kvasir.checkpoint.model_config import read_model_config
from kvasir.checkpoint.tensors import read_tensors
from kvasir.sizing.adapters import adapter_bytes
from kvasir.sizing.shape import EngineShape
from kvasir.sizing.weights import weight_parts

pytestmark = pytest.mark.slow


def test_the_slots_take_the_bytes_of_vllms_tensors(alone: Reference) -> None:
    config = read_model_config(alone.folder)
    shape = EngineShape(dtype="float32", adapters=SLOTS, adapter_rank=RANK)
    (computed,) = adapter_bytes(config, weight_parts(config, read_tensors(alone.folder)), shape)
    assert computed == alone.adapter_bytes()
