"""`kvasir record`: writes what arrives at a deployment, how it goes and why it runs where it does to a
file."""

from __future__ import annotations

import secrets
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from kvasir.core.errors import ConfigError
from kvasir.core.size_text import size_text
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.record.arguments import STDOUT
from kvasir_platform.cli.record.files import FileLimits, RecordingFiles
from kvasir_platform.cli.record.run import RecordingOptions, RecordingRun, RecordingState

_LEAST_SALT, _MOST_SALT = 16, 64


@dataclass(frozen=True, slots=True)
class RecordArguments:
    """What the command line asks for. See kvasir_platform.cli.record.arguments."""

    file: Path
    duration_s: float
    limits: FileLimits
    wait_s: float
    salt_file: Path | None
    names: bool
    decisions: bool
    block_tokens: int


def record(
    wanted: RecordArguments,
    sites: list[Site],
    output: CommandOutput,
    created: datetime,
    stop: threading.Event | None = None,
) -> int:
    """Record until a limit is reached, or the command is stopped; `stop` replaces signals. Raises
    KvasirError.
    """
    if wanted.file == STDOUT:
        # Standard output is the file.
        output = CommandOutput(json=output.json, out=sys.stderr)
    salt = _salt(wanted.salt_file)
    options = RecordingOptions(
        f"record-{secrets.token_hex(6)}",
        salt,
        wanted.duration_s,
        wanted.wait_s,
        names=wanted.names,
        decisions=wanted.decisions,
        block_tokens=wanted.block_tokens,
    )
    state = RecordingState()

    def header(requests: int, complete: bool) -> Mapping[str, Any]:
        return {
            "created": created.isoformat(timespec="seconds"),
            "routers": len(sites),
            "names": "clear" if wanted.names else "salted",
            "complete": complete,
            "requests": requests,
            "dropped": state.dropped,
            "gaps": state.gaps,
            "unfinished": state.unfinished,
        }

    files = RecordingFiles(wanted.file, wanted.limits, header)
    display = _Display(output, wanted.duration_s)
    stop = stop_on_signals() if stop is None else stop
    where = "1 router" if len(sites) == 1 else f"{len(sites)} routers"
    output.text(f"recording {where} to {wanted.file}; Ctrl-C ends it")
    run = RecordingRun(options, sites, files, state, shown=display.show, stop=stop)
    try:
        run.run()
    finally:
        display.end()
    output.data(asdict(state) | {"files": [str(path) for path in files.paths]})
    output.text("\n".join(_summary(wanted.file, files, state)))
    return 0


class _Display:
    """A live line on a terminal."""

    def __init__(self, output: CommandOutput, duration_s: float) -> None:
        self._output = output
        self._duration_s = duration_s

    def show(self, state: RecordingState) -> None:
        if self._output.is_terminal:
            trouble = f"  {state.troubled}" if state.troubled else ""
            dropped = f", {state.dropped:,} dropped" if state.dropped else ""
            self._output.redraw(
                f"{state.elapsed_s:6.0f} of {self._duration_s:.0f} s  {state.requests:,} requests, "
                f"{size_text(state.bytes)}{dropped}{trouble}"[:110]
            )

    def end(self) -> None:
        if self._output.is_terminal:
            self._output.redraw("")


def _summary(file: Path, files: RecordingFiles, state: RecordingState) -> list[str]:
    where = ", ".join(map(str, files.paths)) or str(file)
    lines = [
        f"recorded {files.requests:,} requests in {state.elapsed_s:.0f} s: {where} ({files.bytes:,} bytes)"
    ]
    if state.dropped:
        lines.append(f"{state.dropped:,} more were dropped: routers had no room for them")
    if state.gaps:
        lines.append(f"routers restarted {state.gaps} times; what was not read before is missing")
    if state.unfinished:
        lines.append(
            f"{state.unfinished:,} had not ended, and are missing; --wait sets how long to wait for them"
        )
    if not files.requests:
        lines.append("no request arrived and ended in that time")
    return lines


def _salt(path: Path | None) -> bytes:
    """Return a random salt, or that of a file. Raises ConfigError."""
    if path is None:
        return secrets.token_bytes(_LEAST_SALT)
    try:
        with path.open("rb") as file:
            salt = file.read(_MOST_SALT + 1)
    except OSError as error:
        raise ConfigError(f"--salt-file {path}: {error.strerror or error}") from error
    if not _LEAST_SALT <= len(salt) <= _MOST_SALT:
        raise ConfigError(
            f"--salt-file {path}: it must have {_LEAST_SALT} to {_MOST_SALT} bytes, which nobody can guess: "
            f"head -c 32 /dev/urandom > {path}"
        )
    return salt


def stop_on_signals() -> threading.Event:
    """Return an event that the first SIGINT or SIGTERM sets. The second one ends the process as usual.
    Threads other than the main one get no signals."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        return stop

    def handle(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return stop
