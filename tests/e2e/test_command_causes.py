"""Codes that only the command line says, each caused by a command against a gateway, a file or a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.kit.sim.product import STREAM, product

from kvasir_platform.cli.main import main

KVASIR = (sys.executable, "-m", "kvasir_platform.cli.main")


def error_in(printed: str) -> dict[str, Any]:
    """The error in the last line that a command printed as JSON."""
    error: dict[str, Any] = json.loads(printed.splitlines()[-1])["error"]
    return error


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("KVASIR_HOME", str(folder))
    return folder


async def test_a_drain_that_takes_longer_than_it_may_says_how_to_wait_on_or_undo_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with (
        product() as served,
        served.client.stream("POST", "/v1/completions", json=STREAM) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        assert await served.kvasir("-o", "json", "drain", served.worker, "--timeout", "0.2") == 1
        error = error_in(capsys.readouterr().out)
        assert error["code"] == "drain_timeout"
        assert f"kvasir drain {served.worker} --undo" in error["message"]


def test_what_cannot_work_as_configured_is_said_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "kvasir.yaml"
    spec.write_text(f"gateway: {{api_keys_file: {tmp_path}}}\n")
    assert main(["-o", "json", "keys", "list", "-f", str(spec)]) == 2
    error = error_in(capsys.readouterr().out)
    assert error["code"] == "config_error"
    assert error["message"].startswith(f"gateway.api_keys_file {tmp_path}: ")


@pytest.mark.slow
def test_a_deployment_whose_model_cannot_be_downloaded_does_not_start(home: Path, tmp_path: Path) -> None:
    # Nobody listens on the discard port. An engine that ran in this process has set HF_HUB_OFFLINE.
    nowhere = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "0",
    }
    up = subprocess.run(
        [*KVASIR, "-o", "json", "up", "--port", "0", "--set", "model.source=my-org/none"],
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
        check=False,
    )
    assert up.returncode == 1
    error = error_in(up.stdout)
    assert error["code"] == "start_failed"
    assert error["message"] == "my-org/none could not be downloaded"
    assert error["remedy"].startswith("check the network, the name and HF_TOKEN")
    assert Path(error["log"]).is_relative_to(home)
