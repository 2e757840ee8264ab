"""The copy of a model on a node: made once, complete, and not at the expense of those in use."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvasir.config.spec.deployment import Deployment, LoadSpec, ModelSpec
from kvasir.core.errors import ConfigError
from kvasir_workers.engines.vllm.caches import node_copy as module
from kvasir_workers.engines.vllm.caches import shared_folders
from kvasir_workers.engines.vllm.caches.node_copy import node_copy
from kvasir_workers.engines.vllm.caches.shared_folders import SharedFolders
from kvasir_workers.engines.vllm.replica import served_weights

MIB = 1 << 20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "volume" / "model"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "original").mkdir()
    (folder / ".git").mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(os.urandom(3 * MIB))
    (folder / "b.safetensors").symlink_to(folder.parent / "blob")
    (folder.parent / "blob").write_bytes(os.urandom(MIB))
    for other in ("pytorch_model.bin", "original/a.safetensors", ".git/b"):
        (folder / other).write_text("not read by an engine")
    return folder


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_copy_has_all_that_an_engine_reads(source: Path, tmp_path: Path) -> None:
    copy = node_copy(source, tmp_path / "node", threads=2)
    assert copy.parent == tmp_path / "node"
    assert files(copy) == ["1_Pooling/config.json", "a.safetensors", "b.safetensors", "config.json"]
    for name in files(copy):
        assert (copy / name).read_bytes() == (source / name).read_bytes()
    assert not (copy / "b.safetensors").is_symlink()


def test_other_formats_are_copied_where_there_are_no_safetensors(source: Path, tmp_path: Path) -> None:
    for path in source.glob("*.safetensors"):
        path.unlink()
    assert "pytorch_model.bin" in files(node_copy(source, tmp_path / "node", threads=2))


def test_a_second_worker_reads_the_same_copy(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = node_copy(source, tmp_path / "node", threads=2)
    monkeypatch.setattr(module, "_copy", None)
    assert node_copy(source, tmp_path / "node", threads=2) == first


def test_a_changed_model_is_another_copy(source: Path, tmp_path: Path) -> None:
    first = node_copy(source, tmp_path / "node", threads=2)
    os.utime(source / "a.safetensors", ns=(1, 1))
    assert node_copy(source, tmp_path / "node", threads=2) != first


def test_a_damaged_copy_is_replaced(source: Path, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; "
    code += f"from {module.__name__} import node_copy; print(node_copy(*map(Path, sys.argv[1:]), 1))"
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "node")]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    copy = Path(ended.stdout.strip())
    os.truncate(copy / "a.safetensors", 5)
    assert node_copy(source, tmp_path / "node", threads=2) == copy
    assert (copy / "a.safetensors").stat().st_size == 3 * MIB


def test_a_damaged_copy_that_is_used_is_left_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folders, "_RETRY_S", 0)
    copy = node_copy(source, tmp_path / "node", threads=2)
    os.truncate(copy / "a.safetensors", 5)
    assert node_copy(source, tmp_path / "node", threads=2) == source


def test_each_tenth_is_logged(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    node_copy(source, tmp_path / "node", threads=1)
    assert "copied 100 % of" in caplog.text


class Disk:
    """A disk of 100 MiB, on which copies below `cache` take room. 5 MiB of it are to stay free."""

    def __init__(self, cache: Path, others: int) -> None:
        self.cache, self.others = cache, others

    def usage(self, path: Path) -> Any:
        used = sum(each.stat().st_size for each in path.rglob("*.safetensors"))
        return SimpleNamespace(total=100 * MIB, free=100 * MIB - self.others - used)


def test_without_room_the_model_is_read_where_it_is(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", Disk(tmp_path / "node", 92 * MIB).usage)
    assert node_copy(source, tmp_path / "node", threads=2) == source
    assert "its copy needs 4 MiB, and" in caplog.text
    assert "has room for 3 MiB" in caplog.text
    assert [path.suffix for path in (tmp_path / "node").iterdir()] == [".lock"]


def test_room_is_made_by_removing_copies_that_nobody_uses(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "node"
    monkeypatch.setattr(shutil, "disk_usage", Disk(cache, 86 * MIB).usage)
    held = SharedFolders(cache).hold("held", lambda draft: None)
    for name in ("old", "older"):
        (cache / name).mkdir()
        (cache / name / "x.safetensors").write_bytes(b"x" * 3 * MIB)
        (cache / f"{name}.lock").touch()
    os.utime(cache / "older.lock", (1, 1))
    os.utime(cache / "held.lock", (0, 0))
    assert node_copy(source, cache, threads=2).parent == cache
    assert held.is_dir()
    assert (cache / "old").is_dir()
    assert not (cache / "older").exists()


def test_a_folder_that_cannot_be_written_is_refused_by_its_field(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"model\.load\.node_cache: .* cannot be written: Not a directory"):
        node_copy(source, tmp_path / "file" / "node", threads=2)


def test_a_model_that_changes_while_it_is_copied_is_not_used(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_copy_file", lambda source, target, progress: target.write_text("less"))
    with pytest.raises(OSError, match="changed while it was copied"):
        node_copy(source, tmp_path / "node", threads=2)


def test_an_engine_loads_the_copy_if_the_spec_asks_for_one(source: Path, tmp_path: Path) -> None:
    assert served_weights(Deployment(), source, tmp_path) == source
    load = LoadSpec(node_cache=str(tmp_path / "node"))
    copied = served_weights(Deployment(model=ModelSpec(load=load)), source, tmp_path)
    assert copied.parent == tmp_path / "node"
