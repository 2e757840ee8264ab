"""What `kvasir up` started is gone when it has stopped, however it was stopped."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.kit.processes import lives

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SIMULATED = ("--set", "pools.prefill.engine.kind=sim", "--set", "pools.decode.engine.kind=sim")
StartStack = Callable[..., AbstractContextManager["Stack"]]


def _shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """The files of shared memory that these processes map."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found |= {Path(each.path) for each in process.memory_maps() if each.path.startswith("/dev/shm/")}
    return found


def _alive(processes: list[psutil.Process]) -> list[str]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if lives(process):
                found.append(f"{process.pid} {process.name()}")
    return found


def _listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def _assert_gone(stack: Stack, processes: list[psutil.Process], memory: set[Path], temp_dir: str) -> None:
    assert _alive(processes) == []
    assert not _listening(stack.address)
    assert [path for path in memory if path.exists()] == []
    assert not Path(temp_dir).exists()


def _temp_dir(stack: Stack) -> str:
    state = json.loads((stack.home / "kvasir" / "state.json").read_text())
    return str(state["temp_dir"])


def test_ctrl_c_leaves_no_process_port_shared_memory_or_ray_session(
    start_stack: StartStack, tmp_path: Path
) -> None:
    with start_stack(tmp_path) as stack:
        processes, temp_dir = stack.processes(), _temp_dir(stack)
        assert len(processes) > 8
        assert (Path(temp_dir) / "ray").exists()
        memory = _shared_memory(processes)
        assert memory
        stack.process.send_signal(signal.SIGINT)
        assert stack.process.wait(timeout=90) == 0
        _assert_gone(stack, processes, memory, temp_dir)


def test_down_from_another_terminal_does_the_same(start_stack: StartStack, tmp_path: Path) -> None:
    with start_stack(tmp_path, *SIMULATED) as stack:
        processes, temp_dir = stack.processes(), _temp_dir(stack)
        memory = _shared_memory(processes)
        down = stack.kvasir("down")
        assert down.returncode == 0, down.stderr
        _assert_gone(stack, processes, memory, temp_dir)
        assert stack.kvasir("status").returncode == 1


def test_a_supervisor_that_is_killed_takes_everything_along_and_the_next_up_cleans_up(
    start_stack: StartStack, tmp_path: Path
) -> None:
    with start_stack(tmp_path, *SIMULATED) as stack:
        processes, temp_dir = stack.processes(), _temp_dir(stack)
        stack.process.kill()
        psutil.wait_procs(processes, timeout=60.0)
        assert _alive(processes) == []
        down = stack.kvasir("down")
        assert down.returncode == 0, down.stderr
        assert not Path(temp_dir).exists()
