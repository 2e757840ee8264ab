"""The file with a worker's output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir_workers.pool.output_log import LOGS_VARIABLE, OutputLog, prune

PROGRAM = """
import os, subprocess, sys
from kvasir_workers.pool.output_log import OutputLog
print("before")
OutputLog.keep("decode")
print("after", flush=True)
os.write(2, b"native\\n")
subprocess.run([sys.executable, "-c", "print('a child')"])
"""


def test_everything_that_a_worker_and_its_children_print_is_in_its_file(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, LOGS_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "before\n"
    (log,) = tmp_path.iterdir()
    assert log.name.startswith("worker-decode-")
    assert log.read_text() == "after\nnative\na child\n"
    assert log.stat().st_mode & 0o077 == 0


def test_without_a_folder_the_output_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(LOGS_VARIABLE, raising=False)
    assert OutputLog.keep("decode") is None
    monkeypatch.setenv(LOGS_VARIABLE, str(tmp_path / "absent"))
    assert OutputLog.keep("decode") is None


def test_a_file_that_is_too_large_goes_on_empty_and_keeps_its_end(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "worker-decode-1.log", limit=8)
    writer = os.open(log.path, os.O_WRONLY | os.O_APPEND)
    os.write(writer, b"12345678")
    log.trim()
    assert log.path.read_bytes() == b"12345678"
    os.write(writer, b"9")
    log.trim()
    os.write(writer, b"next")
    os.close(writer)
    assert log.path.read_bytes() == b"next"
    assert log.path.with_name("worker-decode-1.log.1").read_bytes() == b"23456789"


def test_a_file_that_begins_anew_says_again_whose_it_is(tmp_path: Path) -> None:
    log = OutputLog(tmp_path / "worker-decode-1.log", limit=20)
    writer = os.open(log.path, os.O_WRONLY | os.O_APPEND)

    def state_name() -> None:
        os.write(writer, b"decode-aa\n")

    log.emptied = state_name
    for _ in range(3):
        os.write(writer, b"more than twenty bytes\n")
        log.trim()
    os.close(writer)
    assert log.path.read_bytes() == b"decode-aa\n"


def test_only_the_newest_files_of_workers_that_have_ended_are_kept(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    pid = int(ended.stdout)
    for number, name in enumerate(["a", "b", "c"]):
        path = tmp_path / f"worker-{name}-{pid}.log"
        path.touch()
        os.utime(path, (number, number))
    own, other = tmp_path / f"worker-a-{os.getpid()}.log", tmp_path / "control.log"
    for path in (own, other):
        path.touch()
        os.utime(path, (0, 0))
    prune(tmp_path, kept=1)
    assert {path.name for path in tmp_path.iterdir()} == {f"worker-c-{pid}.log", own.name, other.name}
