"""Real processes are killed, stopped, continued and terminated, each with a proof."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from tests.kit.lab.processes import Processes, descriptors, proc_state, resident_bytes

from kvasir.core.errors import StartError

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None)\n"
    "print('{\"event\": 1}', flush=True)\n"
)
POLITE = (
    "import json, signal\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
    "print(json.dumps({'event': 'serving', 'address': 'here'}), flush=True)\n"
    "signal.sigwait({signal.SIGTERM})\n"
)


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    made = Processes(tmp_path)
    yield made
    await made.close(1.0)


async def test_a_killed_process_is_gone_by_sigkill(processes: Processes) -> None:
    process = await processes.start("victim", ["sleep", "60"])
    proof = await process.kill()
    assert proof.status == -signal.SIGKILL
    assert proof.state == ""
    assert not process.alive
    with pytest.raises(RuntimeError, match="ended before SIGKILL"):
        await process.kill()


async def test_a_frozen_process_is_stopped_until_it_is_thawed(processes: Processes) -> None:
    process, _ = await processes.start_ready("sleeper", python(POLITE), "serving")
    assert (await process.freeze()).state == "T"
    assert process.alive
    assert (await process.thaw()).state in "SR"
    assert (await process.terminate()).status == 0


async def test_the_first_event_is_what_it_said(processes: Processes) -> None:
    process, said = await processes.start_ready("polite", python(POLITE), "serving")
    assert said["address"] == "here"
    assert descriptors(process.pid) > 0
    assert resident_bytes(process.pid) > 1 << 20


async def test_a_process_that_says_something_else_is_told_with_its_log(processes: Processes) -> None:
    program = 'print(\'{"event": "failed", "message": "no such pool"}\')'
    with pytest.raises(StartError, match="no such pool"):
        await processes.start_ready("wrong", python(program), "serving")


async def test_a_process_that_ends_in_silence_is_not_waited_for(processes: Processes) -> None:
    with pytest.raises(StartError, match="did not say 'serving'"):
        await asyncio.wait_for(processes.start_ready("mute", ["true"], "serving"), 10.0)


async def test_terminate_tells_of_an_end_that_was_not_in_good_order(processes: Processes) -> None:
    process = await processes.start("rude", ["sleep", "60"])
    with pytest.raises(RuntimeError, match=f"ended with {-signal.SIGTERM}"):
        await process.terminate()


async def test_close_reaps_frozen_and_stubborn_processes(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    stubborn = python(STUBBORN + "while True: time.sleep(1)")
    started = [
        await processes.start("plain", ["sleep", "60"]),
        (await processes.start("stubborn", stubborn)),
    ]
    await started[1].first
    await started[0].freeze()
    await processes.close(0.2)
    assert [proc_state(each.pid) for each in started] == ["", ""]


async def test_close_tells_of_a_process_that_outlives_the_one_that_started_it(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    program = f"import subprocess\nsubprocess.Popen(['sleep', '61'], start_new_session=True)\n{POLITE}"
    process, _ = await processes.start_ready("parent", python(program), "serving")
    (left,) = psutil.Process(process.pid).children()
    try:
        with pytest.raises(RuntimeError, match="sleep"):
            await processes.close()
    finally:
        left.kill()
