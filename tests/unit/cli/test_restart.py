"""`kvasir restart` in the pod of a control process uses the socket of the pod's template."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest

from kvasir_platform.cli.commands.restart import restart
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cluster.local.commands import SOCKET, listening


def test_the_pod_s_control_process_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "control.sock"
    monkeypatch.setenv(SOCKET, str(path))
    pools: list[tuple[str, str]] = []

    def answer() -> None:
        asked = commands.wait(10)
        assert asked is not None
        ask, caller = asked
        pools.append((ask.command, ask.pool))
        caller.tell("done", pool=ask.pool, replaced=1, wanted=1)

    with listening(path) as commands:
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            assert restart("decode", None, CommandOutput(json=True, out=io.StringIO())) == 0
        finally:
            thread.join()
    assert pools == [("restart", "decode")]
