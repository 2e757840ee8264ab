"""An object in its own process, called over a socket, so that CPU time is counted for each side.

`python -m load_tests.scenarios.kv_parts.remote FD MODULE:CLASS ARGS-AS-JSON` serves it to its parent.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CPU = "cpu_s"
"""Method of every remote object: CPU seconds of all threads of the process so far."""


class RemoteError(RuntimeError):
    """The exception of the other process, with its traceback."""


class Remote:
    """The object that `target` (module:class) makes of `args`; `env` extends the process's environment."""

    def __init__(self, target: str, *args: Any, env: dict[str, str] | None = None) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), target, json.dumps(args)],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(env or {})},
                cwd=ROOT,
            )
        self._connection = Connection(mine.detach())

    def begin(self, method: str, *args: Any) -> None:
        """Begin a call without waiting; `result` must follow."""
        self._connection.send((method, args))

    def result(self) -> Any:
        """Return the result of the call. Raise RemoteError."""
        ok, value = self._connection.recv()
        if not ok:
            raise RemoteError(value)
        return value

    def call(self, method: str, *args: Any) -> Any:
        """Call and wait. Raise RemoteError."""
        self.begin(method, *args)
        return self.result()

    def end(self) -> None:
        """Terminate the process."""
        self._connection.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(connection: Connection, target: str, args: list[Any]) -> None:
    """Answer calls until the other side closes the connection."""
    module, _, name = target.partition(":")
    served: Any = None
    while True:
        try:
            method, given = connection.recv()
        except EOFError:
            return
        try:
            if method == CPU:
                connection.send((True, time.process_time()))
                continue
            # Created in the first call, so that an exception of the constructor reaches the caller.
            served = served or getattr(importlib.import_module(module), name)(*args)
            connection.send((True, getattr(served, method)(*given)))
        # Every exception is returned to the caller.
        except Exception:  # noqa: BLE001
            connection.send((False, traceback.format_exc()))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2], json.loads(sys.argv[3]))
