"""Processes that can be killed, stopped, continued and terminated, each with proof that it happened.

A fault that did not happen makes every test of it pass. Each method therefore returns the process's state as
the kernel reports it, and raises if it is not the requested one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kvasir.collector import gc_paused
from kvasir.core.errors import StartError
from kvasir_platform.cluster.local.processes import Child, Children, tail

START_S = 60.0
_GRACE_S = 5.0
_POLL_S = 0.002
_STATE_S = 5.0


@dataclass(frozen=True, slots=True)
class Proof:
    """The kernel's view of a process: `state` is the letter in /proc (`T` stopped, `S` or `R` running, empty
    after exit), `status` its wait status (negative for a signal, None while it runs)."""

    pid: int
    state: str
    status: int | None


@dataclass(slots=True)
class LabProcess:
    """One process of a lab. `first` is the first event that it printed: one JSON object in a line that begins
    with its `event`."""

    name: str
    child: Child
    first: asyncio.Future[dict[str, Any]]
    frozen: bool = field(default=False)

    @property
    def pid(self) -> int:
        """Its process id, also when it runs in a namespace."""
        return self.child.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.child.returncode is None

    async def kill(self) -> Proof:
        """Send SIGKILL. Raise RuntimeError if it had already exited for another reason."""
        return await self._end(signal.SIGKILL, -signal.SIGKILL)

    async def terminate(self, grace_s: float = _GRACE_S) -> Proof:
        """Send SIGTERM, and wait for exit status 0. Raise TimeoutError after `grace_s`, and RuntimeError for
        another status."""
        return await self._end(signal.SIGTERM, 0, grace_s)

    async def freeze(self) -> Proof:
        """Send SIGSTOP. Raise RuntimeError if it does not stop."""
        self.frozen = True
        return await self._become(signal.SIGSTOP, "T")

    async def thaw(self) -> Proof:
        """Send SIGCONT. Raise RuntimeError if it does not run again."""
        self.frozen = False
        return await self._become(signal.SIGCONT, "SRD")

    def proof(self) -> Proof:
        """The current state."""
        return Proof(self.pid, proc_state(self.pid), self.child.returncode)

    async def _end(self, number: signal.Signals, expected: int, within_s: float = _GRACE_S) -> Proof:
        if not self.alive:
            raise RuntimeError(f"{self.name} had ended before {number.name}: {self.child.returncode}")
        self.child.signal(number)
        status = await asyncio.wait_for(self.child.wait(), within_s)
        if status != expected:
            raise RuntimeError(f"{self.name} ended with {status} after {number.name}; see {self.child.log}")
        return self.proof()

    async def _become(self, number: signal.Signals, states: str) -> Proof:
        self.child.signal(number)
        for _ in range(round(_STATE_S / _POLL_S)):
            proof = self.proof()
            if proof.state and proof.state in states:
                return proof
            await asyncio.sleep(_POLL_S)
        raise RuntimeError(f"{self.name} is in state {self.proof()} after {number.name}")


class Processes:
    """Starts processes that log to `folder`; `close` terminates and reaps all of them."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._children = Children(folder, os.environ if env is None else env)
        self._started: list[LabProcess] = []
        self._count = 0

    async def start(self, name: str, argv: Sequence[str]) -> LabProcess:
        """Start `argv` with its output in NAME-K.log; K counts the starts of one name. Raise StartError."""
        self._count += 1
        first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def on_line(line: str) -> None:
            # Log lines may be JSON objects too; only events have an `event`.
            if not first.done() and line.startswith('{"event"'):
                with contextlib.suppress(ValueError):
                    first.set_result(json.loads(line))

        child = await self._children.spawn(f"{name}-{self._count}", argv, on_line=on_line)
        process = LabProcess(name, child, first)
        self._started = [each for each in self._started if each.alive]
        self._started.append(process)
        return process

    async def start_ready(
        self, name: str, argv: Sequence[str], event: str, within_s: float = START_S
    ) -> tuple[LabProcess, dict[str, Any]]:
        """Start `argv` and wait for its first event, which must be `event`. Raise StartError with the end of
        its log if it prints another event, exits, or takes longer."""
        process = await self.start(name, argv)
        ended = asyncio.ensure_future(process.child.wait())
        try:
            await asyncio.wait((process.first, ended), timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        said = process.first.result() if process.first.done() else None
        if said is None or said.get("event") != event:
            end = "\n".join(tail(process.child.log))
            raise StartError(
                f"{name} did not say {event!r} within {within_s:g} s; it said: {end}",
                log=str(process.child.log),
                remedy="read its log for the reason",
            )
        return process, said

    async def close(self, grace_s: float = _GRACE_S) -> None:
        """Continue, terminate and reap all of them. Raise RuntimeError if a process that one of them had
        started goes on."""
        begun = [each for process in self._started if process.alive for each in _descendants(process.pid)]
        for process in self._started:
            if process.alive and process.frozen:
                process.child.signal(signal.SIGCONT)
        await self._children.stop(grace_s)
        _, alive = await asyncio.to_thread(psutil.wait_procs, begun, timeout=_GRACE_S)
        if alive:
            raise RuntimeError(f"processes outlive those that started them: {alive}")


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def proc_state(pid: int) -> str:
    """The state letter of /proc/PID/stat, empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The preceding name is in brackets and may contain anything.
    return text.rpartition(")")[2].split()[0]


def descriptors(pid: int) -> int:
    """Open file descriptors of a process; 0 if it has exited."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


async def leaves_nothing_open(act: Callable[[], Awaitable[None]], within_s: float = 10.0) -> None:
    """Act several times, and wait until all descriptors are closed that this opened in this process, without
    garbage being collected. Raise TimeoutError."""
    # The first time opens what stays open.
    await act()
    before = descriptors(os.getpid())
    with gc_paused():
        for _ in range(8):
            await act()
        async with asyncio.timeout(within_s):
            # Threads of gRPC's close connections.
            while descriptors(os.getpid()) > before:
                await asyncio.sleep(0.01)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it has exited."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
