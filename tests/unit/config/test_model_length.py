"""`model.max_model_len`: a number, or the maximum that the model states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.kit.model_folder import write_model

from kvasir.config.checks.problems import SpecError
from kvasir.config.load.loader import dump, loads
from kvasir.config.load.model_files import resolve_model
from kvasir.config.load.model_support import with_length
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError

LLAMA = {"architectures": ["LlamaForCausalLM"]}


def auto(*overrides: str) -> Deployment:
    return loads("model: {max_model_len: auto}", "t.yaml", overrides)


def length(folder: Path, *overrides: str, **config: Any) -> int:
    return with_length(auto(*overrides), write_model(folder, LLAMA | config)).model.context_length


def test_a_number_stays_and_needs_no_model(tmp_path: Path) -> None:
    deployment = loads("model: {max_model_len: 77}", "t.yaml")
    assert with_length(deployment, tmp_path / "nowhere") is deployment
    assert deployment.model.context_length == 77


def test_auto_is_what_the_model_states(tmp_path: Path) -> None:
    assert length(tmp_path, max_position_embeddings=12_345) == 12_345
    assert with_length(auto(), resolve_model("kvasir-tiny")).model.context_length == 4096


def test_auto_counts_what_engines_override(tmp_path: Path) -> None:
    rope = "{{rope_scaling: {{rope_type: linear, factor: {}}}}}"
    both = [f"pools.{name}.engine.args.hf_overrides={rope.format(4)}" for name in ("prefill", "decode")]
    assert length(tmp_path, *both, max_position_embeddings=1000) == 4000
    apart = [
        "disaggregation=never",
        "pools=[{name: a, role: both}, {name: b, role: both}]",
        f"pools.a.engine.args.hf_overrides={rope.format(2)}",
    ]
    assert length(tmp_path, *apart, max_position_embeddings=1000) == 1000


def test_auto_of_a_model_that_states_nothing_asks_for_a_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"states no number of positions; set model.max_model_len to a"):
        length(tmp_path)


def test_auto_is_no_number_before_the_model_is_read() -> None:
    with pytest.raises(RuntimeError, match="max_model_len is auto"):
        _ = auto().model.context_length


def test_a_dump_keeps_auto() -> None:
    assert loads(dump(auto()), "t.yaml").model.max_model_len == "auto"


@pytest.mark.parametrize("wrong", ["automatic", "15", "-1"])
def test_anything_else_is_refused_once(wrong: str) -> None:
    with pytest.raises(SpecError) as refused:
        loads(f"model: {{max_model_len: {wrong}}}", "t.yaml")
    assert str(refused.value).count("model.max_model_len") == 1
