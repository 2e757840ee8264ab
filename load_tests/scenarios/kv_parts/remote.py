"""An object in a process of its own, called over a socket, so that CPU time is counted for each side.

`python -m load_tests.scenarios.kv_parts.remote FD MODULE:CLASS ARGS-AS-JSON` serves it to its starter.
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
"""A method that every object has here: CPU seconds of all threads of the process so far."""


class RemoteError(RuntimeError):
    """What the other process raised, with its traceback."""


class Remote:
    """The object that `target`, as module:class, makes of `args`; `env` is added to the process's."""

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
        """Call without waiting; `result` is to follow."""
        self._connection.send((method, args))

    def result(self) -> Any:
        """Of the call that was begun. Raises RemoteError."""
        ok, value = self._connection.recv()
        if not ok:
            raise RemoteError(value)
        return value

    def call(self, method: str, *args: Any) -> Any:
        """Call and wait. Raises RemoteError."""
        self.begin(method, *args)
        return self.result()

    def end(self) -> None:
        """End the process."""
        self._connection.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(connection: Connection, target: str, args: list[Any]) -> None:
    """Answer calls until the other side is gone."""
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
            # Made at the first call, so that what its constructor raises has somebody to hear it.
            served = served or getattr(importlib.import_module(module), name)(*args)
            connection.send((True, getattr(served, method)(*given)))
        # Whatever is wrong here is the caller's to know.
        except Exception:  # noqa: BLE001
            connection.send((False, traceback.format_exc()))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2], json.loads(sys.argv[3]))
