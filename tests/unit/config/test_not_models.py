"""Sources that are near to a model are refused with what they are and what to set instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir.config.load.model_files import resolve_model
from kvasir.core.errors import ConfigError


def refusal(source: object) -> str:
    with pytest.raises(ConfigError) as refused:
        resolve_model(str(source), download=False)
    message = refused.value.message
    assert "; " in message, "what to do follows after a semicolon"
    return message


def folder_with(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("files", "what", "remedy"),
    [
        (("adapter_config.json", "adapter_model.safetensors"), "is a LoRA adapter", "the adapter in `lora`"),
        (("model-Q4_K_M.gguf", "README.md"), "has weights in GGUF", "tokenizer.json and safetensors"),
        (("model_index.json",), "is a pipeline of diffusers", "choose another model"),
        (("params.json", "consolidated.safetensors"), "in the format of its authors", "model*.safe"),
        (("consolidated.00.pth",), "in the format of its authors", "in Hugging Face's format"),
        (("model.safetensors", "tokenizer.json"), "and no config.json", "download the whole model"),
        (("notes.txt",), "holds no config.json", "name the folder that has it"),
        ((), "is empty", "download the model into it"),
    ],
)  # fmt: skip
def test_a_folder_without_a_model_is_named_for_what_it_is(
    tmp_path: Path, files: tuple[str, ...], what: str, remedy: str
) -> None:
    folder = folder_with(tmp_path / "it", *files)
    said, _, todo = refusal(folder).partition("; ")
    assert said.startswith(f"model.source '{folder}': {folder} ")
    assert what in said
    assert remedy in todo


def test_an_adapter_comes_with_the_model_that_it_was_trained_for(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "adapter_model.safetensors")
    settings = {"base_model_name_or_path": "owner/base", "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    assert "set model.source to owner/base, and name the adapter" in refusal(folder)


def test_the_folder_above_a_model_comes_with_those_below(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder_with(tmp_path / name, "config.json")
    assert refusal(tmp_path).endswith(f"set model.source to {tmp_path / 'a'} (or b)")


@pytest.mark.parametrize("below", ["", "snapshots"])
def test_a_folder_of_the_hub_s_cache_comes_with_the_model_s_id(tmp_path: Path, below: str) -> None:
    cached = tmp_path / "models--owner--some-model"
    folder_with(cached / "snapshots" / "0a1b", "config.json")
    folder_with(cached / "refs", "main")
    assert refusal(cached / below).endswith("; set model.source to owner/some-model")


def test_a_file_comes_with_its_folder(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", "config.json", "model.safetensors", "m.gguf")
    said = refusal(folder / "model.safetensors")
    assert said.endswith(f"is a file; set model.source to its folder, {folder}")
    assert "is a file in GGUF" in refusal(folder / "m.gguf")


def test_a_file_of_the_form_of_an_id_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_with(tmp_path / "models", "m.gguf")
    monkeypatch.chdir(tmp_path)
    assert "is a file in GGUF" in refusal("models/m.gguf")


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/owner/some-model",
        "huggingface.co/owner/some-model/tree/main",
        "hf://owner/some-model",
    ],
)
def test_an_address_of_the_hub_comes_with_the_id(address: str) -> None:
    assert refusal(address) == f"model.source '{address}' is an address; set model.source to owner/some-model"


@pytest.mark.parametrize("source", ["owner/some-model@v1.2", "owner/some-model:v1.2"])
def test_an_id_with_a_revision_comes_with_both_fields(source: str) -> None:
    assert refusal(source).endswith("; set model.source to owner/some-model and model.revision to v1.2")


def test_a_misspelled_folder_comes_with_the_nearest(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "llama-3.1-8b", "config.json")
    assert f"the nearest is {folder}; " in refusal(tmp_path / "lama-3.1-8b")


def test_a_path_that_the_system_refuses_is_an_error_of_the_spec() -> None:
    assert "cannot be read: File name too long" in refusal("/" + "x" * 300)
