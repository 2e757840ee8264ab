"""Models in object storage: what is copied, what is streamed, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvasir.checkpoint.model_config import read_model_config
from kvasir.config.checks.problems import SpecError
from kvasir.config.load import object_storage
from kvasir.config.load.loader import load
from kvasir.config.load.model_files import resolve_model
from kvasir.config.load.model_support import needs_weights, refuse_model
from kvasir.config.load.object_storage import object_folder, stated_weight_bytes
from kvasir.config.load.support import unsupported_features
from kvasir.config.spec.redis import bucket_of
from kvasir.core.errors import ConfigError

URI = "s3://bucket/llama"


class Storage:
    """The streamer's `pull_files` for objects that a test names."""

    def __init__(self, **objects: str) -> None:
        self.objects, self.pulls = objects, 0

    def pull_files(self, uri: str, folder: str, allow: Any, ignore: list[str]) -> None:
        self.pulls += 1
        assert uri == URI + "/"
        assert "*.safetensors" in ignore
        for name, text in self.objects.items():
            Path(folder, name).write_text(text)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Storage:
    made = Storage(**{"config.json": "{}", "tokenizer.json": "{}"})
    package = ModuleType("runai_model_streamer")
    package.__spec__ = SimpleNamespace()  # type: ignore[assignment]
    package.pull_files = made.pull_files  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "runai_model_streamer", package)
    monkeypatch.setenv("HOME", str(tmp_path))
    return made


@pytest.fixture
def no_streamer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(object_storage, "streamer_is_installed", lambda: False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_the_files_beside_the_weights_are_copied_once(storage: Storage) -> None:
    folder = resolve_model(URI)
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json"}
    assert resolve_model(URI + "/") == folder
    assert storage.pulls == 1


@pytest.mark.usefixtures("storage")
def test_a_check_copies_nothing() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(URI, download=False)
    assert caught.value.code == "model_not_cached"


@pytest.mark.usefixtures("no_streamer")
@pytest.mark.parametrize("download", [False, True])
def test_without_the_streamer_it_is_said_what_to_install(download: bool) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.source 's3.* pip install 'runai-model-streamer\["
    ) as caught:
        resolve_model(URI, download=download)
    assert caught.value.code == "no_streamer"


def test_an_empty_path_is_refused_and_leaves_nothing(storage: Storage, tmp_path: Path) -> None:
    storage.objects = {}
    with pytest.raises(ConfigError, match="no files below it"):
        object_folder(URI, "model.source", download=True, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_error_of_the_storage_names_the_field_and_where_credentials_come_from(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("Access\n denied")

    monkeypatch.setattr(sys.modules["runai_model_streamer"], "pull_files", refuse)
    with pytest.raises(ConfigError, match=r"cannot be read: PermissionError: Access denied; .*AWS_\*"):
        object_folder(URI, "model.source", download=True, cache=tmp_path / "cache")


def test_a_process_that_is_slower_uses_what_the_other_copied(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def meanwhile(uri: str, folder: str, *_: Any) -> None:
        Path(folder, "config.json").write_text("{}")
        other = Path(folder).parent / next(iter(wanted))
        other.mkdir()
        (other / "config.json").write_text("other")

    wanted = {object_folder(URI, "s", download=True, cache=tmp_path / "first").name}
    monkeypatch.setattr(sys.modules["runai_model_streamer"], "pull_files", meanwhile)
    folder = object_folder(URI, "s", download=True, cache=tmp_path / "second")
    assert (folder / "config.json").read_text() == "other"
    assert list((tmp_path / "second").iterdir()) == [folder]


def test_the_size_of_the_weights_is_what_the_index_states(tmp_path: Path) -> None:
    assert stated_weight_bytes(tmp_path) == 0
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 16_060_522_496}, "weight_map": {}}))
    assert stated_weight_bytes(tmp_path) == 16_060_522_496
    index.write_text("{}")
    assert stated_weight_bytes(tmp_path) == 0


def test_no_weights_are_looked_for_in_a_folder() -> None:
    assert needs_weights(load(None, ["model.source=kvasir-tiny"]))
    assert not needs_weights(load(None, [f"model.source={URI}"]))


@pytest.mark.usefixtures("no_streamer")
def test_a_worker_refuses_to_stream_without_the_streamer() -> None:
    folder = resolve_model("kvasir-tiny")
    assert read_model_config(folder).architectures
    refuse_model(load(), folder)
    with pytest.raises(ConfigError, match="pip install"):
        refuse_model(load(None, ["model.load.format=runai_streamer"]), folder)


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("model.load.format=safetensors", "model.load.format"),
        ("model.load.node_cache=/cache", "model.load.node_cache"),
        ("model.quantization=int8", "model.quantization"),
        ("tiers.disk={path: /kv, bytes: 1073741824}", "tiers.disk"),
        ("tiers.redis={url: 'redis://r:6379'}", "tiers.redis"),
    ],
)
def test_what_needs_weights_in_a_folder_is_refused(option: str, field: str) -> None:
    assert not unsupported_features(load(None, [option]), platform="cpu")
    (problem,) = unsupported_features(load(None, [f"model.source={URI}", option]), platform="cpu")
    assert problem.startswith(f"{field}: ")
    assert "; " in problem


def test_a_draft_is_not_streamed() -> None:
    engine = "engine: {speculative: {method: draft_model, model: 's3://b/draft'}}"
    deployment = load(None, ["disaggregation=never", f"pools=[{{name: a, role: both, {engine}}}]"])
    (problem,) = unsupported_features(deployment, platform="cpu")
    assert problem.startswith("pools.a.engine.speculative.model: ")


def test_a_node_cache_is_an_absolute_path() -> None:
    with pytest.raises(SpecError, match="absolute path"):
        load(None, ["model.load.node_cache=cache"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["storage=gs://bucket"], "s3://BUCKET/PREFIX"),
        (["storage=s3://bucket/../other"], "s3://BUCKET/PREFIX"),
        (["storage=s3://key:secret@bucket"], "s3://BUCKET/PREFIX"),
        (["s3.region=eu-central-1"], "has no effect on a folder"),
        (["storage=s3://bucket", "s3.endpoint=https://a:b@host"], "without credentials"),
        (["storage=s3://bucket", "s3.endpoint=http://host:99999"], "Port out of range"),
    ],
)
def test_a_storage_of_batches_that_is_no_bucket_is_refused(options: list[str], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        load(None, [f"gateway.batches.{option}" for option in options])


def test_batches_in_a_bucket_need_no_other_server() -> None:
    spec = load(None, ["gateway.batches.storage=s3://my-bucket/kvasir/batches/"]).gateway.batches
    assert (spec.in_objects, spec.redis) == (True, None)
    assert bucket_of(spec.storage or "") == ("my-bucket", "kvasir/batches")
