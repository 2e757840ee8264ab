"""A private Redis server that can be stopped, killed, restarted and configured, for tests and load tests.

All calls block, like those of the tier. Faults are proven as in `processes`: a fault that did not happen
makes every test of it pass.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Self

from tests.kit.lab.processes import proc_state
from tests.kit.processes import free_port
from tests.kit.programs import program

from kvasir.core.errors import StartError
from kvasir_platform.cluster.local import parent_watch
from kvasir_platform.cluster.local.processes import tail

_START_S = 30.0
_STATE_S = 5.0
_POLL_S = 0.005


class RedisServer:
    """A server on the loopback interface without persistence. `options` are further arguments, such as
    `--requirepass`; `password` is the login of `ask`. Starts on entry, and exits on exit or with the thread
    that started it."""

    def __init__(self, folder: Path, *options: str, password: str = "") -> None:
        self._folder = folder
        self._options = options
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """`host:port`; the same after a restart."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The URL for the deployment spec."""
        return f"redis://{self.address}/0"

    @property
    def pid(self) -> int:
        """Process id of the running server. Raise RuntimeError if there is none."""
        if self._process is None:
            raise RuntimeError("the server does not run")
        return self._process.pid

    def start(self) -> None:
        """Start it, empty, on its previous port, and wait until it answers. Raise StartError with the end of
        its log, and MissingProgramError."""
        self.port = self.port or free_port()
        log = self._folder / f"redis-{self.port}.log"
        command = [
            program("redis-server"),
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        command += ["--dir", str(self._folder), "--logfile", str(log), *self._options]
        tied = [sys.executable, "-S", "-E", parent_watch.__file__, str(os.getpid()), *command]
        self._process = subprocess.Popen(tied, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                end = "\n".join(tail(log))
                raise StartError(
                    f"redis-server does not answer: {end}", log=str(log), remedy="read its log for the reason"
                )
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Send SIGKILL, and wait for its exit. Raise RuntimeError if it had already exited."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            raise RuntimeError("the server had ended before")
        process.kill()
        if process.wait() != -signal.SIGKILL:
            raise RuntimeError(f"the server ended with {process.returncode}")

    def freeze(self) -> None:
        """Send SIGSTOP, and wait until the kernel reports it as stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        self._until("T")

    def thaw(self) -> None:
        """Send SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self._until("SRD")

    def ask(self, *words: str | bytes) -> str:
        """Send one command; return the first line of the answer, or of its text. Raise OSError."""
        with self._asked(*words) as stream:
            line = stream.readline()
            return (stream.readline() if line.startswith(b"$") else line).decode().strip()

    def info(self, section: str) -> dict[str, str]:
        """One section of INFO. Raise OSError."""
        with self._asked("INFO", section) as stream:
            text = stream.read(int(stream.readline()[1:])).decode()
        pairs = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
        return {name: value for name, _, value in pairs}

    def close(self) -> None:
        """Terminate it. Idempotent."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.kill()
        if process is not None:
            process.wait()

    @contextlib.contextmanager
    def _asked(self, *words: str | bytes) -> Iterator[BinaryIO]:
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=_STATE_S) as connection,
            connection.makefile("rb") as stream,
        ):
            if self._password:
                connection.sendall(_packed(("AUTH", self._password)))
                stream.readline()
            connection.sendall(_packed(words))
            yield stream

    def _answers(self) -> bool:
        try:
            return self.ask("PING") == "+PONG"
        except OSError:
            return False

    def _until(self, states: str) -> None:
        deadline = time.monotonic() + _STATE_S
        while (state := proc_state(self.pid)) == "" or state not in states:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server is in state {state!r}, not one of {states}")
            time.sleep(_POLL_S)


def _packed(words: Sequence[str | bytes]) -> bytes:
    raws = [word.encode() if isinstance(word, str) else word for word in words]
    parts = [b"$%d\r\n%b\r\n" % (len(raw), raw) for raw in raws]
    return b"*%d\r\n" % len(parts) + b"".join(parts)
