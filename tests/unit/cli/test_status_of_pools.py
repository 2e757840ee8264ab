"""`kvasir status` in the pod of a control process: the pools, and why they do not start."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir.core.errors import UpstreamError
from kvasir_platform.cli.commands.status.report import status
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cluster.local.commands import SOCKET, ControlCommand, listening, socket_path

POOLS = [
    {"pool": "prefill", "state": "RUNNING", "wanted": 1, "running": 1, "detail": ""},
    {"pool": "decode", "state": "DEPLOY_FAILED", "wanted": 2, "running": 0, "detail": "attempt 3 failed"},
]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ControlCommand]]:
    """What a control process is asked; it answers once."""
    found: list[ControlCommand] = []
    monkeypatch.setenv(SOCKET, str(socket_path(tmp_path)))
    with listening(socket_path(tmp_path)) as commands:

        def answer() -> None:
            if (taken := commands.wait(10.0)) is not None:
                found.append(taken[0])
                taken[1].tell("done", pools=POOLS)

        thread = threading.Thread(target=answer)
        thread.start()
        yield found
        thread.join()


def test_each_pool_is_shown_with_its_replicas_and_the_reason(
    asked: list[ControlCommand], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(None, CommandOutput(json=False)) == 1
    assert asked == [ControlCommand("status", "")]
    sentence, _, *lines = capsys.readouterr().out.splitlines()
    assert sentence.startswith(
        "Service is degraded: 0 of 2 replicas of pool decode run (attempt 3 failed). See"
    )
    rows = [line.split(maxsplit=5) for line in lines]
    assert rows[0] == ["POOL", "STATE", "RUNNING", "DETAIL"]
    assert rows[1] == ["prefill", "RUNNING", "1", "of", "1"]
    assert rows[2] == ["decode", "DEPLOY_FAILED", "0", "of", "2", "attempt 3 failed"]


def test_as_json_they_are_all_there(asked: list[ControlCommand], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(None, CommandOutput(json=True)) == 1
    assert asked
    assert json.loads(capsys.readouterr().out) == POOLS


def test_a_control_process_that_does_not_answer_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOCKET, str(tmp_path / "absent.sock"))
    with pytest.raises(UpstreamError, match="does not answer"):
        status(None, CommandOutput(json=False))
