"""What `kvasir up --detach` repeats of the process that goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvasir_platform.cli.common.detach import follow
from kvasir_platform.cluster.local.runtime_dir import DeploymentState, RuntimeDir


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def test_the_output_is_repeated_to_its_end_however_late_the_last_lines_come(
    tmp_path: Path, child: int
) -> None:
    runtime, log = RuntimeDir(tmp_path, "kvasir"), tmp_path / "log"
    runtime.create()
    ready = DeploymentState("kvasir", "id", child, "ready", 0.0, "m", "s", "logs", "temp", 1.0)
    runtime.write(ready)
    log.write_text("starting\n")
    repeated: list[str] = []
    later: list[Callable[[], object]] = [
        lambda: log.write_text("starting\nis served at http://127.0.0.1:1\n"),
        lambda: runtime.write(msgspec.structs.replace(ready, announced=True)),
    ]

    def pause(_: float) -> None:
        later.pop(0)()

    assert follow(child, runtime, log, repeated.append, pause) == 0
    assert "".join(repeated) == "starting\nis served at http://127.0.0.1:1\n"
