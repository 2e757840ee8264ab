"""How a failed start is explained."""

from __future__ import annotations

import io
import json
from pathlib import Path

from kvasir.core.errors import StartError
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.common.progress import explain


def shown(error: StartError) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    explain(error, CommandOutput(json=False, out=out, err=err))
    return err.getvalue(), out.getvalue()


def test_a_root_error_is_shown_with_its_remedy_and_without_the_log(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("Traceback (most recent call last):\n")
    err, out = shown(StartError("no memory", log=str(log), remedy="raise x", is_root=True))
    assert err == "error: no memory\n"
    assert out == f"Raise x.\nThe worker's log is {log}.\n"


def test_in_json_the_remedy_and_the_log_are_fields() -> None:
    out = io.StringIO()
    explain(
        StartError("no memory", log="/l", remedy="raise x", is_root=True), CommandOutput(json=True, out=out)
    )
    error = {"code": "start_failed", "message": "no memory", "remedy": "raise x", "log": "/l"}
    assert json.loads(out.getvalue()) == {"error": error}


def test_any_other_error_is_shown_with_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("terminate called\n")
    err, out = shown(StartError("a process ended", log=str(log), remedy="read its log"))
    assert err == "error: a process ended\n"
    assert "  | terminate called\n" in out
    assert out.endswith("\nRead its log.\n")
