"""The janitor removes only what is proven to be ours."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvasir_platform.cluster.local.janitor import Janitor, marked_environment
from kvasir_platform.cluster.local.runtime_dir import ProcessRecord

ID = f"test-{os.getpid()}"
HOLD = """
import mmap, sys
files = [open(path, "r+b") for path in sys.argv[1:]]
maps = [mmap.mmap(file.fileno(), 0) for file in files]
print("held", flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that maps files until it is told to end."""

    def __init__(self, *paths: Path, marker: str | None = ID) -> None:
        env = dict(os.environ) if marker is None else marked_environment(dict(os.environ), marker)
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, *map(str, paths)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture
def holders() -> Iterator[list[Holder]]:
    made: list[Holder] = []
    yield made
    for holder in made:
        holder.close()


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


def segment(shm: Path, name: str) -> Path:
    path = shm / name
    path.write_bytes(b"x" * mmap.PAGESIZE)
    return path


def janitor(shm: Path, *, started_at: float | None = None, supervised: bool = False) -> Janitor:
    began = time.time() - 1 if started_at is None else started_at
    return Janitor(ID, started_at=began, supervised=supervised, shm=shm)


@pytest.mark.parametrize("name", ["psm_1a2b", "sem.mp-x_y", "vllm_dist_a-tp:0-[0-1]-cpushm_0", "plasmaXX"])
def test_a_file_that_a_process_of_ours_left_is_removed(shm: Path, holders: list[Holder], name: str) -> None:
    path = segment(shm, name)
    holder = Holder(path)
    ours = janitor(shm)
    records = ours.shared_memory(ours.processes())
    assert [record.path for record in records] == [str(path)]
    holder.close()
    left = ours.remove(records, None)
    assert left.removed == (str(path),)
    assert not path.exists()


def test_a_file_that_got_its_name_after_it_was_mapped_is_found(shm: Path) -> None:
    first = segment(shm, "sem.temporary")
    holder = Holder(first)
    (shm / "sem.mp-abc").hardlink_to(first)
    first.unlink()
    ours = janitor(shm)
    records = ours.shared_memory(ours.processes())
    holder.close()
    assert ours.remove(records, None).removed == (str(shm / "sem.mp-abc"),)


def test_a_file_of_another_deployment_is_not_ours(shm: Path, holders: list[Holder]) -> None:
    holders.append(Holder(segment(shm, "psm_other"), marker="another"))
    ours = janitor(shm)
    assert ours.processes() == []
    assert ours.shared_memory(ours.processes()) == set()


def test_a_file_of_another_form_is_never_ours(shm: Path, holders: list[Holder]) -> None:
    holders.append(Holder(segment(shm, "model.safetensors")))
    ours = janitor(shm)
    assert ours.shared_memory(ours.processes()) == set()


def test_a_file_older_than_the_deployment_is_not_ours(shm: Path, holders: list[Holder]) -> None:
    holders.append(Holder(segment(shm, "psm_old")))
    ours = janitor(shm, started_at=time.time() + 60)
    assert ours.shared_memory(ours.processes()) == set()


def test_a_file_that_another_process_still_maps_stays(shm: Path, holders: list[Holder]) -> None:
    path = segment(shm, "psm_shared")
    holder = Holder(path)
    ours = janitor(shm)
    records = ours.shared_memory(ours.processes())
    holders.append(Holder(path, marker=None))
    holder.close()
    left = ours.remove(records, None)
    assert path.exists()
    assert left.remaining == (f"{path} (another process has it open)",)


def test_a_new_file_under_a_recorded_name_stays(shm: Path, holders: list[Holder]) -> None:
    path = segment(shm, "psm_reused")
    holder = Holder(path)
    ours = janitor(shm)
    records = ours.shared_memory(ours.processes())
    holder.close()
    path.rename(shm / "kept so that the inode is not reused")
    segment(shm, "psm_reused")
    assert ours.remove(records, None).removed == ()
    assert path.exists()


def test_marked_processes_and_their_unmarked_children_are_ours(shm: Path, holders: list[Holder]) -> None:
    holders.append(Holder())
    script = "import subprocess, sys; subprocess.run(['sleep', '60'], env={})"
    parent = subprocess.Popen([sys.executable, "-c", script], env=marked_environment(dict(os.environ), ID))
    try:
        root = psutil.Process(parent.pid)
        for _ in range(200):
            if root.children():
                break
            time.sleep(0.02)
        wanted = {parent.pid, root.children()[0].pid, holders[0].process.pid}
        assert {process.pid for process in janitor(shm).processes()} == wanted
    finally:
        for child in root.children():
            child.kill()
        parent.kill()
        parent.wait()


def test_a_recorded_process_is_ours_only_with_its_start_time(shm: Path, holders: list[Holder]) -> None:
    holders.append(Holder(marker=None))
    pid = holders[0].process.pid
    created = psutil.Process(pid).create_time()
    ours = janitor(shm)
    assert [p.pid for p in ours.processes([ProcessRecord(pid, created, "x")])] == [pid]
    assert ours.processes([ProcessRecord(pid, created - 5, "an earlier process with this id")]) == []


def test_killing_ends_all_of_ours_and_nobody_else(shm: Path, holders: list[Holder]) -> None:
    holders += [Holder(), Holder(), Holder(marker="another")]
    left = janitor(shm).kill()
    assert len(left.killed) == 2
    assert left.remaining == ()
    assert [holder.process.poll() is None for holder in holders] == [False, False, True]


def test_the_temporary_folder_is_removed(shm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "temp"
    (folder / "deep").mkdir(parents=True)
    assert janitor(shm).remove((), folder).remaining == ()
    assert not folder.exists()
