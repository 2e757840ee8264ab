"""The errors of vLLM's child processes, which vLLM itself only logs.

The core and the ranks log the exception that ends them, and the front learns only that they ended. A file can
configure the logging of all processes of vLLM (VLLM_LOGGING_CONFIG_PATH): ours adds a handler that writes the
exceptions where the front reads them. A process that fails earlier, such as by an import, only prints its
exception, to the standard error that it shares with the front.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvasir.core.errors import EngineStartError
from kvasir_workers.engines.vllm.setup.start_causes import StartCause, cause_of, cause_of_end

CONFIG_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
FATAL = (
    "EngineCore failed to start.",
    "EngineCore encountered a fatal error.",
    "WorkerProc failed to start.",
    "WorkerProc failed.",
)
"""Messages with which a child process of vLLM logs the exception that ends it."""
GENERIC = (
    "Engine core initialization failed.",
    "EngineCore encountered an issue.",
    "WorkerProc initialization failed",
)
"""Beginnings of messages that only say that another process failed."""
START_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What vLLM's front raises for a model or configuration with which it does not start."""
_FORMAT = "%(levelname)s %(asctime)s %(processName)s %(process)d %(name)s: %(message)s"
_MOST_CHARACTERS = 8000
_MOST_RECORDS = 64
_STDERR = 2
_TAIL_BYTES = 64 << 10
_PRINTED = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception): .+)$", re.MULTILINE)


class EngineError(msgspec.Struct, frozen=True):
    """An exception that a process of vLLM logged: the log's `text`, the exception's type and message."""

    text: str
    kind: str
    message: str


class ErrorRecords(logging.Handler):
    """Appends the exceptions of log records to the file `path`, a line each, while that file exists."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path
        self._left = _MOST_RECORDS

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or self._left == 0:
            return
        self._left -= 1
        message = str(error)[:_MOST_CHARACTERS]
        line = msgspec.json.encode(EngineError(record.getMessage(), type(error).__name__, message)) + b"\n"
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                # One write, so that lines of several processes do not mix.
                os.write(descriptor, line)
            finally:
                os.close(descriptor)


def logging_config(level: str, records: Path) -> dict[str, Any]:
    """Return the configuration of vLLM's loggers, in the schema of logging.config.dictConfig: standard error,
    and the file of ErrorRecords."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"kvasir": {"format": _FORMAT}},
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "level": level, "formatter": "kvasir"},
            "records": {"class": f"{ErrorRecords.__module__}.{ErrorRecords.__name__}", "path": str(records)},
        },
        "loggers": {"vllm": {"handlers": ["stderr", "records"], "level": level, "propagate": False}},
    }


class EngineErrors:
    """The errors of one engine's processes, in a private folder. `level` is vLLM's log level."""

    def __init__(self, level: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvasir-errors-"))
        # Also at the end of a process that has not closed it.
        self._remove = partial(shutil.rmtree, self._folder, ignore_errors=True)
        atexit.register(self._remove)
        self._records = self._folder / "errors.jsonl"
        self._records.touch(mode=0o600)
        self._config = self._folder / "logging.json"
        self._config.write_bytes(msgspec.json.encode(logging_config(level, self._records)))
        self._memory_kills = memory_kills()
        self._output = _OutputSince()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables to set before the engine is started."""
        return {CONFIG_VARIABLE: str(self._config)}

    def why(self, error: object) -> str:
        """Return the root error of `error`, with which the front of vLLM reports the end of its core."""
        front = str(error)
        if not front.startswith(GENERIC):
            return front
        if (root := root_error(_decoded(self._records))) is not None:
            return f"{root.kind}: {root.message}"
        return self._end(front, "engine").sentence

    def start_error(self, error: Exception, pool: str, what: str) -> EngineStartError:
        """Return the error for an engine of `pool`, named `what`, of which vLLM's front reports `error`."""
        engine, front = f"pools.{pool}.engine", str(error)
        if not front.startswith(GENERIC):
            cause = cause_of(type(error).__name__, front, engine)
        elif (root := root_error(_decoded(self._records))) is not None:
            cause = cause_of(root.kind, root.message, engine)
        else:
            cause = self._end(front, engine)
        return EngineStartError(
            f"{what} does not start: {cause.sentence}", remedy=cause.remedy, permanent=cause.permanent
        )

    def _end(self, front: str, engine: str) -> StartCause:
        memory = self._memory_ran_out()
        return cause_of_end(front, out_of_memory=memory, engine=engine, printed=self._output.last_exception())

    def _memory_ran_out(self) -> bool:
        return memory_kills() > self._memory_kills

    def close(self) -> None:
        """Remove the folder; the engine's processes then record nothing more. Idempotent."""
        if os.environ.get(CONFIG_VARIABLE) == str(self._config):
            # vLLM refuses to start with a configuration that does not exist.
            del os.environ[CONFIG_VARIABLE]
        atexit.unregister(self._remove)
        self._remove()


class _OutputSince:
    """What this process and its children print to standard error from here on, where that is a file
    (kvasir_workers.pool.output_log)."""

    def __init__(self) -> None:
        self._start = self._size()

    @staticmethod
    def _size() -> int:
        """Return 0 if it is no file."""
        with contextlib.suppress(OSError):
            status = os.fstat(_STDERR)
            return status.st_size if stat.S_ISREG(status.st_mode) else 0
        return 0

    def last_exception(self) -> str:
        """Return its type and message, "" if there is none."""
        size = self._size()
        # A file that has become too large is emptied.
        start = self._start if size >= self._start else 0
        with contextlib.suppress(OSError):
            with Path(f"/proc/self/fd/{_STDERR}").open("rb") as stream:
                stream.seek(max(start, size - _TAIL_BYTES))
                found = _PRINTED.findall(stream.read(_TAIL_BYTES).decode(errors="replace"))
            return str(found[-1]) if found and size else ""
        return ""


def root_error(errors: Sequence[EngineError]) -> EngineError | None:
    """Return the first error that ended a process by itself, else the last one that says anything."""
    own = [error for error in errors if not error.message.startswith(GENERIC)]
    fatal = [error for error in own if error.text in FATAL]
    return fatal[0] if fatal else own[-1] if own else None


def memory_kills() -> int:
    """Return how many processes of this machine the kernel has ended because memory ran out, in containers
    too; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _decoded(path: Path) -> list[EngineError]:
    found = []
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(line, type=EngineError))
    return found
