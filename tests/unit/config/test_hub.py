"""What is known of a model on the Hugging Face Hub before it is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.hub_server import Hub, serving
from tests.kit.model_folder import write_model, write_safetensors

from kvasir.config.load.hub import HubUnreachableError, hub_files
from kvasir.core.errors import ConfigError

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
GIB = 1 << 30


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = write_model(tmp_path / "m", CONFIG, {"model.embed_tokens.weight": ("BF16", (GIB, 2))})
    with serving(Hub({"maker/model": folder})) as made:
        yield made


def test_configuration_and_sizes_are_read_without_the_weights(hub: Hub) -> None:
    found = hub_files("maker/model", "main", hub.url)
    assert found.config.raw == CONFIG
    assert found.files == {"config.json", "tokenizer.json", "model.safetensors"}
    assert [(each.name, each.nbytes, each.file) for each in found.tensors] == [
        ("model.embed_tokens.weight", 4 * GIB, "model.safetensors")
    ]
    assert hub.sent_bytes < 200_000
    assert found.download_bytes > 4 * GIB


def test_the_local_cache_stays_as_it_is(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    found = hub_files("maker/model", "main", hub.url)
    assert not (tmp_path / "cache").exists()
    assert found.cache == str(tmp_path / "cache")
    assert found.free_bytes > 0


def test_what_an_interrupted_download_has_left_is_not_counted_again(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    whole = hub_files("maker/model", "main", hub.url).download_bytes
    blobs = tmp_path / "cache" / "models--maker--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(bytes(1000))
    assert hub_files("maker/model", "main", hub.url).download_bytes == whole - 1000


def test_shards_are_read_and_a_copy_in_one_file_is_not_counted_twice(hub: Hub) -> None:
    folder = hub.folders["maker/model"]
    weight_map = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        write_safetensors(folder / name, {f"w{number}": ("BF16", (number,))})
        weight_map[f"w{number}"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = hub_files("maker/model", "main", hub.url)
    assert sorted((each.name, each.nbytes) for each in found.tensors) == [("w1", 2), ("w2", 4)]


def test_of_two_layouts_that_one_counts_which_the_engine_loads(hub: Hub) -> None:
    folder = hub.folders["maker/model"]
    write_safetensors(folder / "consolidated.safetensors", {"w": ("BF16", (3,))})
    found = hub_files("maker/model", "main", hub.url)
    assert [(each.name, each.file) for each in found.tensors] == [("w", "consolidated.safetensors")]
    assert found.download_bytes > 4 * GIB, "both are downloaded"


@pytest.mark.parametrize(
    ("name", "revision", "says"),
    [
        ("maker/gone", "main", "the Hub has no model maker/gone, or it is private; correct model.source"),
        ("maker/gated", "main", "maker/gated is gated; accept its terms on its page and set HF_TOKEN"),
        ("maker/kept", "main", "the Hub denies maker/kept to this token (HTTP 401); set HF_TOKEN to"),
        ("maker/model", "v9", "maker/model has no revision v9; correct model.revision"),
    ],
)
def test_what_cannot_be_downloaded_is_refused_with_what_to_do(
    hub: Hub, name: str, revision: str, says: str
) -> None:
    hub.errors |= {"maker/gated": "GatedRepo", "maker/kept": "InvalidToken"}
    with pytest.raises(ConfigError) as refused:
        hub_files(name, revision, hub.url)
    assert refused.value.message.startswith(says)
    assert not isinstance(refused.value, HubUnreachableError)


def test_a_repository_without_configuration_is_no_model(hub: Hub) -> None:
    (hub.folders["maker/model"] / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        hub_files("maker/model", "main", hub.url)


def test_a_repository_that_is_near_to_a_model_is_named_for_what_it_is(hub: Hub) -> None:
    folder = hub.folders["maker/model"]
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(ConfigError, match=r"maker/model \(revision main\) is a LoRA adapter and no"):
        hub_files("maker/model", "main", hub.url)


def test_a_path_that_has_the_form_of_an_id_is_told_to_be_no_folder_either(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="or it is private, and there is no folder models/llama; correct"):
        hub_files("models/llama", "main", hub.url)


def test_a_weight_file_with_an_invalid_header_is_named(hub: Hub) -> None:
    (hub.folders["maker/model"] / "model.safetensors").write_bytes(b"\x05" + bytes(7) + b"{{{{{")
    with pytest.raises(ConfigError, match=r"maker/model: .*model\.safetensors"):
        hub_files("maker/model", "main", hub.url)


def test_a_hub_that_does_not_answer_says_nothing_about_the_model() -> None:
    with pytest.raises(HubUnreachableError, match="the Hub does not answer"):
        hub_files("maker/model", "main", "http://127.0.0.1:1")
