"""Where the files of an adapter come from: folders, and downloads that are bounded and deleted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvasir.core.errors import ConfigError, RequestError
from kvasir_workers.adapters import hub, sources
from kvasir_workers.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from kvasir_workers.adapters.sources import AdapterSources

ALLOWED = ("s3://my-bucket/lora", "my-org/")
OBJECTS = {f"lora/sql/{CONFIG_FILE}": b"{}", f"lora/sql/{WEIGHTS_FILE}": b"weights"}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[AdapterSources]:
    folders = (str(tmp_path / "adapters"),)
    (tmp_path / "adapters").mkdir()
    made = AdapterSources((*ALLOWED, *folders), max_bytes=20, cache_folder=tmp_path / "cache")
    yield made
    made.close()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """An S3 client with these objects, in place of boto3."""
    objects = dict(OBJECTS)

    def download(bucket: str, key: str, path: str) -> None:
        assert bucket == "my-bucket"
        Path(path).write_bytes(objects[key])

    client = SimpleNamespace(
        head_object=lambda Bucket, Key: {"ContentLength": len(objects[Key])},
        download_file=download,
    )
    boto3 = ModuleType("boto3")
    boto3.client = lambda _: client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "boto3", boto3)
    return objects


def refused(made: AdapterSources, source: str) -> tuple[int, str]:
    with pytest.raises(RequestError) as caught:
        made.fetch(source)
    return caught.value.status, caught.value.code


def test_a_folder_is_used_where_it_is_and_never_deleted(made: AdapterSources, tmp_path: Path) -> None:
    folder = tmp_path / "adapters" / "sql"
    folder.mkdir()
    assert made.fetch(str(folder)) == folder
    made.discard(folder)
    made.close()
    assert folder.is_dir()


def test_a_link_does_not_lead_out_of_an_allowed_folder(made: AdapterSources, tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "secrets")
    assert refused(made, str(tmp_path / "adapters" / "link")) == (403, "adapter_source_not_allowed")


def test_what_is_not_allowed_or_not_there_is_told_apart(made: AdapterSources, tmp_path: Path) -> None:
    assert refused(made, str(tmp_path / "secrets")) == (403, "adapter_source_not_allowed")
    assert refused(made, "other-org/sql") == (403, "adapter_source_not_allowed")
    assert refused(made, "nonsense") == (400, "invalid_value")
    assert refused(made, str(tmp_path / "adapters" / "nothing")) == (400, "adapter_unreadable")


def test_s3_objects_are_downloaded_and_deleted_again(
    made: AdapterSources, bucket: dict[str, bytes], tmp_path: Path
) -> None:
    folder = made.fetch("s3://my-bucket/lora/sql")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        CONFIG_FILE: b"{}",
        WEIGHTS_FILE: b"weights",
    }
    made.discard(folder)
    assert not folder.exists()
    made.fetch("s3://my-bucket/lora/sql/")
    made.close()
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_object_that_is_too_large_is_not_downloaded(
    made: AdapterSources, bucket: dict[str, bytes], tmp_path: Path
) -> None:
    bucket[f"lora/sql/{WEIGHTS_FILE}"] = b"x" * 19
    assert refused(made, "s3://my-bucket/lora/sql") == (400, "adapter_too_large")
    assert [path.name for path in (tmp_path / "cache").glob("*/*")] == ["lock"]


def test_an_object_that_is_not_there_is_an_unavailable_source(
    made: AdapterSources, bucket: dict[str, bytes]
) -> None:
    bucket.clear()
    assert refused(made, "s3://my-bucket/lora/sql") == (502, "adapter_source_unavailable")


def test_without_a_library_for_s3_the_error_says_what_to_install(
    made: AdapterSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(RequestError, match="pip install boto3") as caught:
        made.fetch("s3://my-bucket/lora/sql")
    assert caught.value.code == "adapter_source_unavailable"


def test_the_hub_is_asked_for_the_revision_and_its_errors_keep_their_kind(
    made: AdapterSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def download(repository: str, revision: str | None, *_: Any, **limits: Any) -> None:
        asked.append((repository, revision, limits["max_bytes"]))
        if repository.endswith("missing"):
            raise ConfigError("there is none", code="file_missing")
        if repository.endswith("huge"):
            raise ConfigError("too much", code="too_large")
        if repository.endswith("offline"):
            raise ConfigError("no network")

    monkeypatch.setattr(sources, "download", download)
    made.fetch("my-org/sql@v2")
    made.fetch("my-org/sql")
    assert asked == [("my-org/sql", "v2", 20), ("my-org/sql", None, 20)]
    assert refused(made, "my-org/missing") == (400, "adapter_unreadable")
    assert refused(made, "my-org/huge") == (400, "adapter_too_large")
    assert refused(made, "my-org/offline") == (502, "adapter_source_unavailable")


def test_the_hub_is_reached_though_the_engine_is_kept_off_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Nothing listens there: what is refused was tried.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    with pytest.raises(ConfigError, match="cannot be downloaded") as caught:
        hub.download("my-org/sql", "v2", [CONFIG_FILE], tmp_path, max_bytes=20, timeout_s=60.0)
    assert "offline" not in caught.value.message.lower()
    with pytest.raises(ConfigError, match=r"not downloaded within 0\.001 s"):
        hub.download("my-org/sql", None, [CONFIG_FILE], tmp_path, max_bytes=20, timeout_s=0.001)


def test_what_a_killed_process_left_is_deleted_and_what_a_living_one_has_is_kept(
    made: AdapterSources, bucket: dict[str, bytes], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    (cache / "dead").mkdir(parents=True)
    (cache / "dead" / "lock").touch()
    held = made.fetch("s3://my-bucket/lora/sql")
    assert not (cache / "dead").exists()
    other = AdapterSources(ALLOWED, max_bytes=20, cache_folder=cache)
    other.fetch("s3://my-bucket/lora/sql")
    assert held.is_dir()
    other.close()
