"""Headers of safetensors files: what they say of tensors, and whether the files are whole."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from tests.kit.model_folder import Tensors, write_safetensors

from kvasir.checkpoint.tensors import TensorHeader, read_tensors, weight_files
from kvasir.config.load.model_files import resolve_model
from kvasir.core.errors import ConfigError

ONE: Tensors = {"w": ("BF16", (2, 3))}


def raw(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def index(folder: Path, *files: str) -> None:
    weight_map = {f"t{at}": name for at, name in enumerate(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_tensors_have_name_dtype_shape_bytes_and_file(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "model.safetensors", {"a": ("BF16", (2, 3)), "b": ("F4", (4, 2)), "c": ("F32", ())}
    )
    assert read_tensors(tmp_path) == (
        TensorHeader("a", "BF16", (2, 3), 12, "model.safetensors"),
        TensorHeader("b", "F4", (4, 2), 4, "model.safetensors"),
        TensorHeader("c", "F32", (), 4, "model.safetensors"),
    )


def test_the_headers_of_a_real_model_sum_up_to_its_file() -> None:
    folder = resolve_model("kvasir-tiny")
    file = folder / "model.safetensors"
    with file.open("rb") as stream:
        head = 8 + struct.unpack("<Q", stream.read(8))[0]
    assert head + sum(tensor.nbytes for tensor in read_tensors(folder)) == file.stat().st_size


def test_the_index_selects_the_shards(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "stale.safetensors"):
        write_safetensors(tmp_path / name, ONE)
    assert [path.name for path in weight_files(tmp_path)] == [
        "model-1.safetensors", "model-2.safetensors", "stale.safetensors",
    ]  # fmt: skip
    index(tmp_path, "model-2.safetensors", "model-1.safetensors", "model-1.safetensors")
    assert [path.name for path in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]


def test_consolidated_files_are_loaded_instead_of_others(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-1.safetensors", ONE)
    index(tmp_path, "model-1.safetensors")
    write_safetensors(tmp_path / "consolidated.safetensors", ONE)
    assert [path.name for path in weight_files(tmp_path)] == ["consolidated.safetensors"]


def test_shards_that_only_the_index_has_are_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-1.safetensors", ONE)
    index(tmp_path, "model-1.safetensors", "model-2.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 1 of the 2 files in .*index.json: model-2.safetensors"):
        read_tensors(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} has no safetensors files"):
        read_tensors(tmp_path)


def test_one_missing_byte_is_noticed(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", ONE)
    write_safetensors(tmp_path / "b.safetensors", ONE, missing_bytes=1)
    size = (tmp_path / "b.safetensors").stat().st_size
    with pytest.raises(ConfigError, match=rf"b.safetensors is truncated: it has {size} bytes, .* {size + 1}"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x01", struct.pack("<Q", 10_000) + b"{", b"version 1 of something"]
)
def test_a_file_that_ends_in_its_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model.safetensors is (truncated|no safetensors file)"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 3]}}, "tensor w of BF16"),
        ({"w": {"dtype": "BF16", "shape": [2], "data_offsets": [2, 6]}}, "gaps at byte 2"),
        ({"w": {"shape": [2], "data_offsets": [0, 4]}}, "no dtype"),
        ({"w": {"dtype": "BF16", "shape": ["x"], "data_offsets": [0, 4]}}, "header is invalid"),
        ({"w": 3}, "header is invalid"),
        ([], "header is invalid"),
        ({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, "2 bytes follow its last tensor"),
    ],
)
def test_an_invalid_header_is_explained(tmp_path: Path, header: object, problem: str) -> None:
    raw(tmp_path / "model.safetensors", header, b"\0" * 6)
    with pytest.raises(ConfigError, match=problem):
        read_tensors(tmp_path)


def test_an_index_without_a_map_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"index.json has no weight_map"):
        read_tensors(tmp_path)
