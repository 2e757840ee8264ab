"""What is wrong with an adapter is found in its files, before an engine reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvasir.config.load.model_files import resolve_model
from kvasir.core.errors import RequestError
from kvasir_workers.adapters.files import CONFIG_FILE, WEIGHTS_FILE, AdapterFiles, base_shapes, read_adapter

TINY = resolve_model("kvasir-tiny")
LORA = TINY.with_name("kvasir-tiny-lora")
BASE = {"layers.0.self_attn.q_proj": (16, 8), "layers.1.self_attn.q_proj": (16, 8)}


def write(folder: Path, shapes: Mapping[str, tuple[int, int]], **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 4, **settings}))
    return folder


def lora(layer: int = 0, rank: int = 4, inputs: int = 8, outputs: int = 16) -> dict[str, tuple[int, int]]:
    at = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
    return {f"{at}.lora_A.weight": (rank, inputs), f"{at}.lora_B.weight": (outputs, rank)}


def read(folder: Path, **limits: Any) -> AdapterFiles:
    return read_adapter(folder, "it", **{"max_rank": 8, "max_bytes": 1 << 20, "base": BASE, **limits})


def refused(folder: Path, **limits: Any) -> tuple[str, str]:
    with pytest.raises(RequestError) as caught:
        read(folder, **limits)
    return caught.value.code, caught.value.message


def test_a_real_adapter_fits_the_model_that_it_was_trained_on() -> None:
    found = read(LORA, base=base_shapes(TINY))
    assert (found.rank, found.folder) == (8, LORA)
    assert found.nbytes == sum((LORA / name).stat().st_size for name in (CONFIG_FILE, WEIGHTS_FILE))


def test_the_digest_is_that_of_the_contents_wherever_they_are(tmp_path: Path) -> None:
    first, same = write(tmp_path / "a", lora()), write(tmp_path / "b", lora())
    assert read(first).digest == read(same).digest
    (same / CONFIG_FILE).write_text((same / CONFIG_FILE).read_text() + " ")
    assert read(first).digest != read(same).digest


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (write(tmp_path / "a", lora()) / name).unlink()
    code, message = refused(tmp_path / "a")
    assert (code, name in message) == ("adapter_unreadable", True)


def test_a_truncated_file_is_named_with_its_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "a", lora()) / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-8])
    code, message = refused(tmp_path / "a")
    assert (code, "is truncated" in message) == ("adapter_unreadable", True)


def test_what_is_no_lora_is_refused(tmp_path: Path) -> None:
    assert refused(write(tmp_path / "a", {"x": (2, 2)}))[0] == "adapter_unreadable"
    (tmp_path / "a" / CONFIG_FILE).write_text("{")
    assert refused(tmp_path / "a")[0] == "adapter_unreadable"


def test_a_rank_above_the_limit_names_the_field_to_raise(tmp_path: Path) -> None:
    code, message = refused(write(tmp_path / "a", lora(rank=9)))
    assert (code, "has rank 9" in message) == ("adapter_rank_too_large", True)
    assert "lora_loading.max_rank" in message
    assert refused(write(tmp_path / "b", lora(), r=16))[0] == "adapter_rank_too_large"


def test_an_adapter_above_the_size_limit_is_not_read(tmp_path: Path) -> None:
    code, message = refused(write(tmp_path / "a", lora()), max_bytes=100)
    assert (code, "lora_loading.max_bytes" in message) == ("adapter_too_large", True)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (lora(inputs=12), "has 8 inputs in the model, and 12 in the adapter"),
        (lora(outputs=12), "has 16 outputs in the model, and 12 in the adapter"),
        (lora(layer=2), "adapts layer 2, and the model's last layer is 1"),
    ],
)
def test_an_adapter_of_another_model_is_refused_with_the_difference(
    tmp_path: Path, shapes: dict[str, tuple[int, int]], said: str
) -> None:
    code, message = refused(write(tmp_path / "a", shapes, base_model_name_or_path="other/model"))
    assert code == "adapter_base_mismatch"
    assert said in message
    assert "'other/model'" in message


def test_a_model_whose_tensors_cannot_be_read_leaves_the_judgement_to_the_engine(tmp_path: Path) -> None:
    assert base_shapes(tmp_path) == {}
    assert read(write(tmp_path / "a", lora(inputs=12)), base={}).rank == 4
