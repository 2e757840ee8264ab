"""The table of vLLM's arguments, and what vLLM makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

import pytest
from tests.kit import vllm_arguments

from kvasir.config.checks import vllm_args
from kvasir.config.checks.vllm_args import VllmArgs
from kvasir.config.load.model_files import resolve_model

MODEL = str(resolve_model("kvasir-tiny"))
pytestmark = pytest.mark.slow


def test_the_table_has_the_arguments_and_types_of_the_installed_vllm() -> None:
    names = {**vars(vllm_args)}
    wanted = {name: eval(kind, names) for name, kind in vllm_arguments.fields().items()}
    assert get_type_hints(VllmArgs) == wanted


CONFIGS: dict[str, dict[str, Any]] = {
    "attention_config": {"backend": "CPU_ATTN"},
    "compilation_config": {"cudagraph_mode": "FULL"},
    "kernel_config": {"moe_backend": "triton"},
    "pooler_config": {"seq_pooling_type": "MEAN"},
    "profiler_config": {},
    "reasoning_config": {},
    "logging_config": {},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mapping_becomes_the_configuration_of_that_name(name: str) -> None:
    from kvasir_workers.engines.vllm.runtime.engine_runtime import engine_args

    made = getattr(engine_args({"model": MODEL, name: CONFIGS[name]}), name)
    assert dataclasses.is_dataclass(made)


def test_a_configuration_with_an_unknown_field_is_refused() -> None:
    from kvasir_workers.engines.vllm.runtime.engine_runtime import engine_args

    with pytest.raises((TypeError, ValueError), match="cudagraf"):
        engine_args({"model": MODEL, "compilation_config": {"cudagraf": 1}})
