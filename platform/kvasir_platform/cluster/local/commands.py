"""The command channel from another terminal to the control process of a running deployment.

It is a Unix socket in the deployment's temporary folder, which only its user can enter. A request is one JSON
object; responses are JSON lines until the command completes. One command runs at a time.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvasir.core.errors import UpstreamError

SOCKET = "KVASIR_CONTROL_SOCKET"
"""The environment variable with the socket's path, in the pod of a control process, for `kubectl exec`."""
MAX_LINE = 4096
# Both sides are on one machine: a peer that takes longer to send or read a line has stopped.
_PATIENCE_S = 1.0
_BACKLOG = 8
_FINAL = frozenset({"done", "failed", "refused"})


class ControlCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request. `replicas` is for `scale` only."""

    command: str
    pool: str
    replicas: int | None = None


def socket_path(temp_dir: Path) -> Path:
    """Return the path of the control process's socket."""
    return temp_dir / "control.sock"


class CommandClient:
    """A connected client, which gets its command's progress. If it disconnects, the command continues."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection: socket.socket | None = connection

    def tell(self, event: str, **details: object) -> None:
        """Send one line; `done`, `failed` and `refused` are the last."""
        if self._connection is None:
            return
        try:
            self._connection.sendall(json.dumps({"event": event, **details}).encode() + b"\n")
        except OSError:
            self.close()
        if event in _FINAL:
            self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class CommandSocket:
    """The control process's end. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen(_BACKLOG)

    def wait(self, timeout_s: float) -> tuple[ControlCommand, CommandClient] | None:
        """Return the next command, None if none arrives in time. Invalid requests are refused here."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        connection, _ = self._socket.accept()
        connection.settimeout(_PATIENCE_S)
        caller = CommandClient(connection)
        try:
            return msgspec.json.decode(_line(connection), type=ControlCommand), caller
        except (OSError, msgspec.DecodeError) as error:
            caller.tell("refused", message=f"not a command: {error}")
            return None

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


def ask(path: Path, what: ControlCommand, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Send a command, and yield the responses up to the last. Raises UpstreamError if no process listens, the
    control process ends meanwhile, or nothing arrives for `timeout_s` seconds."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            connection.sendall(msgspec.json.encode(what) + b"\n")
            with connection.makefile("rb") as answers:
                for line in answers:
                    answer = json.loads(line)
                    yield answer
                    if answer["event"] in _FINAL:
                        return
        except OSError as error:
            raise UpstreamError(
                f"the control process does not answer ({error}); see: kvasir status", code="not_ready"
            ) from error
    raise UpstreamError("the control process has ended; see: kvasir status", code="not_ready")


def _line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        if len(data) > MAX_LINE:
            raise msgspec.DecodeError(f"more than {MAX_LINE} bytes")
        more = connection.recv(MAX_LINE)
        if not more:
            break
        data += more
    return data


@contextlib.contextmanager
def listening(path: Path) -> Iterator[CommandSocket]:
    """Open a CommandSocket that is closed at the end."""
    made = CommandSocket(path)
    try:
        yield made
    finally:
        made.close()
