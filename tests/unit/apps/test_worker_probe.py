"""What the startup probe of a worker's pod prints, which the kubelet makes an event."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir_platform.apps.worker_probe import main
from kvasir_workers.pool.start_notice import (
    MOST_CHARACTERS,
    NOTICE_VARIABLE,
    read_notice,
    remove_notice,
    write_notice,
)


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    path = str(tmp_path / "notice")
    monkeypatch.setenv(NOTICE_VARIABLE, path)
    monkeypatch.setenv("KVASIR_POD_IP", "127.0.0.1")
    return {NOTICE_VARIABLE: path}


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_an_engine_that_serves_passes_and_prints_nothing(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_notice(environ, "an earlier start failed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert main(["--port", str(server.getsockname()[1])]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("environ")
def test_an_engine_that_starts_is_said_to_start(closed_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", str(closed_port)]) == 1
    assert capsys.readouterr().out == "the engine is starting\n"


def test_a_failed_start_is_told_in_one_line_with_what_to_do(
    environ: dict[str, str], closed_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write_notice(environ, "pool decode does not start:\n  no memory is left", "lower x")
    assert main(["--port", str(closed_port)]) == 1
    told = capsys.readouterr().out
    assert told == "the engine did not start: pool decode does not start: no memory is left; lower x\n"
    remove_notice(environ)
    main(["--port", str(closed_port)])
    assert capsys.readouterr().out == "the engine is starting\n"


def test_a_long_reason_is_cut_to_what_an_event_holds(environ: dict[str, str]) -> None:
    write_notice(environ, "x" * 5000)
    assert read_notice(environ) == "x" * MOST_CHARACTERS


def test_without_a_file_nothing_is_written_and_a_folder_that_is_gone_is_no_error(tmp_path: Path) -> None:
    write_notice({}, "lost")
    gone = {NOTICE_VARIABLE: str(tmp_path / "gone" / "notice")}
    write_notice(gone, "lost")
    remove_notice(gone)
    assert read_notice(gone) == read_notice({}) == ""


def test_it_imports_nothing_large() -> None:
    """It runs every few seconds beside an engine that loads its model."""
    large = "{'grpc', 'pydantic', 'ray', 'numpy', 'msgspec'} & set(sys.modules)"
    code = f"import sys, kvasir_platform.apps.worker_probe; print({large} or '')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == ""
