"""Processes of the bench: started, controlled by lines of JSON, and terminated in any state."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from load_tests.scenarios.gateway.usage import tree

ROOT = Path(__file__).resolve().parents[3]
_GRACE_S = 8.0


class ProcessError(Exception):
    """A process ended, timed out or sent an unexpected line; the message has its output."""


class Child:
    """One process. Its output goes to a log in `folder`. If it `talks`, standard output is read as lines of
    JSON instead."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        *,
        talks: bool = True,
        tree: Path = ROOT,
    ) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                argv,
                cwd=tree,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if talks else log,
                stderr=log,
                env={**os.environ, **(env or {})},
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def hear(self, within_s: float) -> dict[str, Any]:
        """Return the next JSON object that it prints, skipping other lines. Raise ProcessError."""
        out = self._process.stdout
        assert out is not None
        deadline = time.monotonic() + within_s
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                raise ProcessError(f"{self.name} printed nothing for {within_s:g} s; {self.words()}")
            line = out.readline()
            if not line:
                raise ProcessError(f"{self.name} ended; {self.words()}")
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict):
                    return said

    def ask(self, order: Mapping[str, Any], within_s: float = 120.0) -> dict[str, Any]:
        """Send a command and return the answer. Raise ProcessError."""
        self.tell(order)
        return self.hear(within_s)

    def tell(self, order: Mapping[str, Any]) -> None:
        """Send a command that is not answered. Raise ProcessError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ProcessError(f"{self.name} ended; {self.words()}") from error

    def words(self) -> str:
        """The end of its log."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-4:])[-600:]

    def stop(self) -> None:
        """Terminate it with its descendants."""
        pids = tree(self.pid)[1:]
        self._process.terminate()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def free_port() -> int:
    """A port on which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
