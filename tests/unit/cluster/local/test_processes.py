"""Child processes end with their parent, their logs are bounded, and their exits are reported."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvasir.core.errors import StartError
from kvasir_platform.cluster.local.processes import BoundedLog, Children, tail


@pytest.fixture
async def children(tmp_path: Path) -> AsyncIterator[Children]:
    made = Children(tmp_path, os.environ)
    yield made
    await made.stop(1.0)


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


async def test_output_goes_to_the_log_and_line_by_line_to_the_listener(
    children: Children, tmp_path: Path
) -> None:
    lines: list[str] = []
    child = await children.spawn("a", python("print('one'); print('two')"), on_line=lines.append)
    assert await child.wait() == 0
    await children.stop(1.0)
    assert lines == ["one", "two"]
    assert tail(tmp_path / "a.log") == ["one", "two"]


async def test_a_child_that_ends_by_itself_is_told_with_its_log(children: Children, tmp_path: Path) -> None:
    await children.spawn("steady", ["sleep", "60"])
    await children.spawn("brief", python("raise SystemExit(3)"))
    error = await children.wait_failed()
    assert "brief" in error.message
    assert "exit status 3" in error.message
    assert error.log == str(tmp_path / "brief.log")


async def test_a_child_has_a_process_group_of_its_own_in_its_parents_session(children: Children) -> None:
    lines: list[str] = []
    program = "import os; print(os.getpid() - os.getpgrp(), os.getsid(0))"
    child = await children.spawn("a", python(program), on_line=lines.append)
    await child.wait()
    await children.stop(1.0)
    assert lines == [f"0 {os.getsid(0)}"]


async def test_sigkill_hints_at_memory(children: Children) -> None:
    child = await children.spawn("big", ["sleep", "60"])
    child.signal(signal.SIGKILL)
    error = await children.wait_failed()
    assert "SIGKILL" in error.message
    assert "memory" in error.remedy


async def test_an_exit_is_seen_while_a_grandchild_holds_the_output(children: Children) -> None:
    program = "import subprocess; subprocess.Popen(['sleep', '5'])"
    child = await children.spawn("parent", python(program))
    assert await asyncio.wait_for(child.wait(), 4.0) == 0


async def test_a_child_that_ignores_sigterm_is_killed(children: Children) -> None:
    program = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    deaf = asyncio.Event()
    child = await children.spawn("deaf", python(program), on_line=lambda _: deaf.set())
    await deaf.wait()
    await children.stop(0.1)
    assert child.returncode == -signal.SIGKILL


async def test_a_stop_is_not_told_as_a_failure(children: Children) -> None:
    await children.spawn("steady", ["sleep", "60"])
    watching = asyncio.create_task(children.wait_failed())
    await asyncio.sleep(0)
    await children.stop(1.0)
    assert not watching.done()
    watching.cancel()


async def test_a_command_that_does_not_exist_ends_at_once_and_its_log_says_so(
    children: Children, tmp_path: Path
) -> None:
    await children.spawn("absent", ["/nowhere/at-all"])
    error = await children.wait_failed()
    assert isinstance(error, StartError)
    await children.stop(1.0)
    assert "No such file" in "\n".join(tail(tmp_path / "absent.log"))


def test_a_log_takes_at_most_twice_its_limit_and_keeps_the_end(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "x.log", limit=1000)
    for number in range(1000):
        log.write(f"line {number}\n".encode())
    log.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    assert tail(tmp_path / "x.log", 1) == ["line 999"]


def test_a_new_run_begins_a_new_log_and_keeps_the_earlier_one(tmp_path: Path) -> None:
    for text in (b"first\n", b"second\n"):
        log = BoundedLog(tmp_path / "x.log")
        log.write(text)
        log.close()
    assert tail(tmp_path / "x.log") == ["second"]
    assert tail(tmp_path / "x.log.1") == ["first"]


def test_the_tail_of_a_large_or_absent_log_is_cheap(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("y" * 1_000_000 + "\nlast\n")
    assert tail(tmp_path / "x.log", 1) == ["last"]
    assert tail(tmp_path / "absent.log") == []
