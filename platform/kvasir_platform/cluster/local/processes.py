"""Child processes of a supervisor: they end with it, have bounded logs, and report every exit."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvasir.core.errors import StartError
from kvasir_platform.cluster.local import parent_watch

LOG_BYTES = 8 << 20
_CHUNK = 64 << 10
_DRAIN_S = 0.2


class BoundedLog:
    """Writes to `path`, and keeps one earlier file beside it (`.1`), so that a log takes at most twice
    `limit` bytes. The output of an earlier process becomes the earlier file."""

    def __init__(self, path: Path, limit: int = LOG_BYTES) -> None:
        self.path = path
        self._limit = limit
        self._rotate()
        self._stream = self._open()

    def write(self, data: bytes) -> None:
        """Append; the file is complete up to here on return."""
        if self._stream.tell() + len(data) > self._limit:
            self._stream.close()
            self._rotate()
            self._stream = self._open()
        self._stream.write(data[-self._limit :])
        self._stream.flush()

    def close(self) -> None:
        """Idempotent."""
        self._stream.close()

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.replace(self.path.with_name(self.path.name + ".1"))

    def _open(self) -> io.BufferedWriter:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return io.BufferedWriter(io.FileIO(descriptor, "ab"))


def tail(path: Path, lines: int = 20) -> list[str]:
    """Return the last `lines` lines of a log of any size; [] if it cannot be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _CHUNK))
            text = stream.read(_CHUNK).decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]


class Child:
    """One running child; `log` is the file of its output."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self.pid = process.pid
        self._process = process

    @property
    def returncode(self) -> int | None:
        """Return its exit status; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its exit status; negative for a signal."""
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; no effect if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


class Children:
    """The children of one supervisor, each in a process group of its own, so that a Ctrl-C in the terminal
    reaches only the supervisor, which stops them in order, and all in its session, so that Linux schedules
    them alike (ADR 54). Call from the main thread's event loop: the kernel ends a child when the thread that
    started it ends."""

    def __init__(self, logs: Path, env: Mapping[str, str]) -> None:
        self._logs = logs
        self._env = dict(env)
        self._children: list[Child] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._stopping = False

    async def spawn(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> Child:
        """Start `argv` with `env` added to the common environment; its output goes to NAME.log, and each
        whole line of it to `on_line`, which must not raise. Raises StartError if the command cannot be
        executed."""
        log = BoundedLog(self._logs / f"{name}.log")
        command = [sys.executable, "-S", "-E", parent_watch.__file__, str(os.getpid()), *argv]
        # A pipe of our own: asyncio reports an exit only after the end of its pipe, which a
        # grandchild may keep open forever.
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env=self._env | dict(env or {}),
            )
        except OSError as error:
            os.close(reading)
            log.close()
            raise StartError(f"{name} cannot be started: {error}") from error
        finally:
            os.close(writing)
        child = Child(name, process, log.path)
        self._children.append(child)
        self._pumps.append(asyncio.create_task(_pump(reading, log, on_line), name=f"log of {name}"))
        return child

    async def wait_failed(self) -> StartError:
        """Wait for the first child that ends by itself, and return it as an error with its log."""
        while True:
            running = {asyncio.create_task(child.wait()): child for child in self._children}
            if not running or self._stopping:
                await asyncio.get_running_loop().create_future()
            try:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in running:
                    task.cancel()
            if self._stopping:
                continue
            child = running[done.pop()]
            return ended(child)

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM to the newest first, wait `grace_s` seconds for each, then SIGKILL. Idempotent."""
        self._stopping = True
        for child in reversed(self._children):
            if child.returncode is None:
                child.signal(signal.SIGTERM)
                try:
                    await asyncio.wait_for(child.wait(), grace_s)
                except TimeoutError:
                    child.signal(signal.SIGKILL)
                    await child.wait()
        if self._pumps:
            # The last output is in the pipes; a pipe that a grandchild keeps open is not waited for.
            await asyncio.wait(self._pumps, timeout=_DRAIN_S)
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)


def ended(child: Child) -> StartError:
    """Return the error for a child that ended by itself."""
    code = child.returncode
    how = f"with exit status {code}"
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            how = f"by {signal.Signals(-code).name}"
    remedy = "read its log for the reason"
    if code == -signal.SIGKILL:
        remedy = "SIGKILL is often the kernel short of memory: see `dmesg`, lower kv_cache_bytes or replicas"
    return StartError(f"{child.name} (pid {child.pid}) ended {how}", log=str(child.log), remedy=remedy)


async def _pump(descriptor: int, log: BoundedLog, on_line: Callable[[str], None] | None) -> None:
    partial = b""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), io.FileIO(descriptor, "rb")
    )
    try:
        while data := await stream.read(_CHUNK):
            log.write(data)
            if on_line is not None:
                *lines, partial = (partial + data).split(b"\n")
                partial = partial[-_CHUNK:]
                for line in lines:
                    on_line(line.decode("utf-8", "replace"))
    finally:
        transport.close()
        log.close()
