"""A real engine that does not start: what the user of `kvasir up` sees, and what is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.suite.started import count_start

from kvasir.config.load.model_files import resolve_model
from kvasir_platform.cluster.local.runtime_dir import RuntimeDir

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sound folder, except for the name of a tensor, which only the engine knows to be wrong."""
    folder = tmp_path / "renamed"
    shutil.copytree(resolve_model("kvasir-tiny"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"model.norm.weight"', b'"model.nerm.weight"', 1))
    return folder


def test_up_ends_at_the_first_failure_with_the_engines_own_error_and_keeps_its_log(
    model: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    count_start("deployments by `kvasir up`", "one that does not start")
    count_start("engines of vLLM", "one that does not start")
    arguments = ("--port", "0", "--set", "disaggregation=never", "--set", f"model.source={model}")
    up = subprocess.run(
        [sys.executable, "-m", "kvasir_platform.cli.main", "up", *arguments],
        env={**os.environ, "KVASIR_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    runtime = RuntimeDir(home, "kvasir")
    (log,) = runtime.logs.glob("worker-serve-*.log")
    text = log.read_text()
    assert up.returncode == 1
    assert up.stderr == (
        "error: pool serve does not start: the weights have a tensor nerm, and LlamaModel does not\n"
    )
    assert up.stdout.endswith(
        "stopped: nothing is left running\n"
        "Check that config.json and the weights in model.source belong to the same model.\n"
        f"The worker's log is {log}.\n"
    )
    assert "Traceback" not in up.stdout
    assert text.count("EngineCore failed to start.") == 1
    state = runtime.read()
    assert state is not None
    assert (state.phase, state.processes) == ("failed", ())
    assert not Path(state.temp_dir).exists()
