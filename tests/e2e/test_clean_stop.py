"""What `kvasir up` started is gone when it has stopped, however it was stopped. `test_stack.py` stops real
engines with Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.kit.footprint import Footprint

if TYPE_CHECKING:
    from tests.kit.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SIMULATED = ("--set", "pools.prefill.engine.kind=sim", "--set", "pools.decode.engine.kind=sim")
StartStack = Callable[..., AbstractContextManager["Stack"]]


def test_down_from_another_terminal_leaves_nothing(start_stack: StartStack, tmp_path: Path) -> None:
    with start_stack(tmp_path, *SIMULATED) as stack:
        footprint = Footprint.of(stack)
        down = stack.kvasir("down")
        assert down.returncode == 0, down.stderr
        footprint.assert_gone()
        assert stack.kvasir("status").returncode == 1


def test_a_supervisor_that_is_killed_takes_everything_along_and_the_next_up_cleans_up(
    start_stack: StartStack, tmp_path: Path
) -> None:
    with start_stack(tmp_path, *SIMULATED) as stack:
        footprint = Footprint.of(stack)
        stack.process.kill()
        psutil.wait_procs(footprint.processes, timeout=60.0)
        assert footprint.alive() == []
        down = stack.kvasir("down")
        assert down.returncode == 0, down.stderr
        assert not footprint.temp_dir.exists()
