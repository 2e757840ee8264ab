"""The folder of a deployment: private, locked by one process, read by many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.local.runtime_dir import DeploymentState, RuntimeDir, deployments

STATE = DeploymentState("a", "id", 1, "ready", 5.0, "m", "s", "l", "t", 1.0)
HOLDER = """
import sys
from pathlib import Path
from kvasir_platform.cluster.local.runtime_dir import RuntimeDir
print(RuntimeDir(Path(sys.argv[1]), "a").holder())
"""
TAKER = HOLDER.replace(".holder()", ".lock()")


@pytest.fixture
def runtime(tmp_path: Path) -> RuntimeDir:
    made = RuntimeDir(tmp_path / "home", "a")
    made.create()
    return made


def elsewhere(program: str, runtime: RuntimeDir) -> str:
    command = [sys.executable, "-c", program, str(runtime.path.parent)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_another_process_sees_who_holds_the_lock_and_cannot_take_it(runtime: RuntimeDir) -> None:
    assert runtime.holder() is None
    lock = runtime.lock()
    assert lock is not None
    with lock:
        holder = elsewhere(HOLDER, runtime)
        assert int(holder) == os.getpid()
        assert elsewhere(TAKER, runtime) == "None"
    assert elsewhere(HOLDER, runtime) == "None"
    assert elsewhere(TAKER, runtime) != "None"


def test_state_is_read_as_it_was_written(runtime: RuntimeDir) -> None:
    assert runtime.read() is None
    runtime.write(STATE)
    assert runtime.read() == STATE


@pytest.mark.parametrize("content", [b"", b"{", b'{"name": 3}', b"[]"])
def test_a_state_that_cannot_be_understood_is_none(runtime: RuntimeDir, content: bytes) -> None:
    (runtime.path / "state.json").write_bytes(content)
    assert runtime.read() is None


def test_the_folder_is_made_private_again(runtime: RuntimeDir) -> None:
    runtime.path.chmod(0o755)
    runtime.create()
    assert runtime.path.stat().st_mode & 0o777 == 0o700


def test_a_link_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "a").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="is a link"):
        RuntimeDir(tmp_path, "a").create()


def test_a_home_that_cannot_be_made_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="KVASIR_HOME"):
        RuntimeDir(tmp_path / "file", "a").create()


def test_deployments_are_those_that_were_locked_once(runtime: RuntimeDir) -> None:
    base = runtime.path.parent
    assert deployments(base) == []
    lock = runtime.lock()
    assert lock is not None
    lock.close()
    assert [found.name for found in deployments(base)] == ["a"]
    assert deployments(base / "absent") == []
