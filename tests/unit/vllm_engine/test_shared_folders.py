"""Folders that processes share: made once, held while used, removed when unused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvasir_workers.engines.vllm.caches import shared_folders as module
from kvasir_workers.engines.vllm.caches.shared_folders import SharedFolders, bytes_in

HOLDER = """
import sys
from pathlib import Path
from kvasir_workers.engines.vllm.caches.shared_folders import SharedFolders

SharedFolders(Path(sys.argv[1])).hold(sys.argv[2], lambda draft: (draft / "by").write_text("another"))
print("held", flush=True)
sys.stdin.read()
"""


def no_making(draft: Path) -> None:
    raise AssertionError(f"{draft} is made a second time")


def fill(draft: Path) -> None:
    (draft / "by").write_text("this process")


def test_a_folder_is_made_once_and_then_found(tmp_path: Path) -> None:
    folders = SharedFolders(tmp_path / "root")
    assert (folders.hold("a", fill) / "by").read_text() == "this process"
    assert SharedFolders(tmp_path / "root").hold("a", no_making) == tmp_path / "root" / "a"


def test_a_folder_that_another_process_holds_is_used_and_not_removed_before_that_ends(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), "a"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        folders = SharedFolders(tmp_path)
        assert not folders.remove("a")
        assert (tmp_path / "a" / "by").read_text() == "another"
        other.kill()
    assert folders.remove("a")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_making_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    folders = SharedFolders(tmp_path)

    def fail(draft: Path) -> None:
        fill(draft)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        folders.hold("a", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]
    assert folders.hold("a", fill).is_dir()


def test_a_folder_that_is_not_whole_is_made_anew(tmp_path: Path) -> None:
    folders = SharedFolders(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "draft-a").mkdir()

    def whole(folder: Path) -> bool:
        return (folder / "by").is_file()

    assert whole(folders.hold("a", fill, whole=whole))


def test_a_process_that_comes_while_a_folder_is_made_waits_and_says_so(tmp_path: Path) -> None:
    making, waits = threading.Event(), threading.Event()
    found: list[Path] = []

    def make(draft: Path) -> None:
        making.set()
        assert waits.wait(30)
        fill(draft)

    first = threading.Thread(target=lambda: found.append(SharedFolders(tmp_path).hold("a", make)))
    first.start()
    assert making.wait(30)
    found.append(SharedFolders(tmp_path).hold("a", no_making, waiting=waits.set))
    first.join()
    assert found == [tmp_path / "a"] * 2


def test_the_least_recently_held_comes_first(tmp_path: Path) -> None:
    folders = SharedFolders(tmp_path)
    for name, held_s in (("a", 3), ("b", 1), ("c", 2)):
        folders.hold(name, fill)
        os.utime(tmp_path / f"{name}.lock", (held_s, held_s))
    assert folders.least_recent() == ["b", "c", "a"]
    folders.hold("b", no_making)
    assert folders.least_recent() == ["c", "a", "b"]


def test_a_damaged_folder_that_is_held_is_neither_used_nor_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0)
    folders = SharedFolders(tmp_path)
    folders.hold("a", fill)
    with pytest.raises(OSError, match="is damaged, and another process uses it"):
        folders.hold("a", no_making, whole=lambda folder: False)


def test_what_is_not_there_is_not_removed(tmp_path: Path) -> None:
    assert not SharedFolders(tmp_path).remove("a")


def test_bytes_are_those_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(b"x" * 10_000)
    assert 10_000 <= bytes_in(tmp_path) < 20_000
