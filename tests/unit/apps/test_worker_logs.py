"""A pod's output has that of its workers."""

from __future__ import annotations

import io
from pathlib import Path

from kvasir_platform.apps.common.worker_logs import WorkerLogs


def test_what_workers_append_is_copied_once(tmp_path: Path) -> None:
    out = io.BytesIO()
    logs = WorkerLogs(tmp_path, out)
    logs.step()
    first = tmp_path / "worker-decode-1.log"
    first.write_bytes(b"one\n")
    (tmp_path / "other.log").write_bytes(b"not a worker's\n")
    logs.step()
    with first.open("ab") as stream:
        stream.write(b"two\n")
    (tmp_path / "worker-decode-2.log").write_bytes(b"second\n")
    logs.step()
    logs.step()
    assert out.getvalue() == b"one\ntwo\nsecond\n"


def test_a_log_that_was_emptied_is_copied_from_its_beginning(tmp_path: Path) -> None:
    out = io.BytesIO()
    logs = WorkerLogs(tmp_path, out)
    log = tmp_path / "worker-decode-1.log"
    log.write_bytes(b"a long line\n")
    logs.step()
    log.write_bytes(b"new\n")
    logs.step()
    assert out.getvalue() == b"a long line\nnew\n"
