"""A test whose time is over ends, whatever it waits for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from tests.kit.suite.loops import new_uvloop


@pytest.fixture
def failing_signal() -> Iterator[signal.Signals]:
    """A signal whose handler fails the test, as that of pytest-timeout does."""

    def fail(number: int, _: object) -> None:
        pytest.fail(f"signal {number}")

    chosen = signal.SIGUSR1
    before = signal.signal(chosen, fail)
    yield chosen
    signal.signal(chosen, before)


def test_a_loop_ends_when_the_handler_of_a_signal_fails_the_test(
    failing_signal: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    async def waits_for_ever() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), failing_signal)
        await asyncio.Event().wait()

    loop = new_uvloop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner, pytest.raises(RuntimeError, match="stopped"):
        runner.run(waits_for_ever())
    assert "waits_for_ever" in capsys.readouterr().err
