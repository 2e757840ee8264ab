"""Files of a recording: bounded, whole at any time, and readable by their owner only.

The first line, the header, has room to be written again: it says whether the recording is complete and what
is missing. Every other line is written as a whole, or taken back.
"""

from __future__ import annotations

import errno
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir_platform.cli.record.arguments import STDOUT
from kvasir_platform.workload.parquet import convert_to_parquet, require_parquet
from kvasir_platform.workload.recording import header_line

HEADER_BYTES = 2048
_PARQUET = ".parquet"


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Bounds of one file, and how many are kept; None: one, after which the recording ends."""

    requests: int
    bytes: int
    keep: int | None = None


class RecordingFiles:
    """Writes to `path`, and once that is full, to `path` with a number. `header` returns further fields of
    the header, given the number of requests in the file and whether it is complete.

    Every method raises UpstreamError if a file cannot be written.
    """

    def __init__(
        self, path: Path, limits: FileLimits, header: Callable[[int, bool], Mapping[str, Any]]
    ) -> None:
        """Raise ConfigError for a path that cannot be used."""
        self._path = path
        self._limits = limits
        self._header = header
        self._block_tokens = 0
        self._file: BinaryIO | None = None
        self._number = 1
        self._in_file = self._size = 0
        self.paths: deque[Path] = deque()
        self.requests = self.bytes = 0
        if path != STDOUT:
            self._check()

    @property
    def full(self) -> bool:
        """Whether nothing more may be written."""
        return self._limits.keep is None and self._file_full

    @property
    def block_tokens(self) -> int:
        """Tokens of the blocks in the file; 0 before it is begun."""
        return self._block_tokens

    def begin(self, block_tokens: int) -> None:
        """Create the first file."""
        self._block_tokens = block_tokens
        self._open(self._path)

    def write(self, line: str) -> None:
        """Write the line of a request, unless `full`."""
        if self._file_full:
            if self.full:
                return
            self._close(complete=True)
            self._number += 1
            self._open(self._path.with_stem(f"{self._path.stem}.{self._number}"))
        data = line.encode()
        self._put(data)
        self._in_file += 1
        self.requests += 1

    def close(self, *, complete: bool) -> None:
        """Write the header again, and close the file."""
        if self._file is not None:
            self._close(complete=complete)

    @property
    def _file_full(self) -> bool:
        return self._in_file >= self._limits.requests or self._size >= self._limits.bytes

    def _check(self) -> None:
        path = self._path
        if path.suffix == _PARQUET:
            require_parquet()
        elif path.suffix != ".jsonl":
            raise ConfigError(
                f"{path}: name a file that ends in .jsonl or .parquet, or - for standard output"
            )
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: the folder {path.parent} does not exist; create it")
        if path.exists():
            raise ConfigError(f"{path} exists; name another file, or remove it")
        if not os.access(path.parent, os.W_OK):
            raise ConfigError(f"{path}: you may not write in {path.parent}; name a file elsewhere")

    def _open(self, path: Path) -> None:
        if path == STDOUT:
            self._file = os.fdopen(sys.stdout.fileno(), "wb", buffering=0, closefd=False)
        else:
            self._file = self._guarded(lambda: _create(_lines_of(path)))
            self.paths.append(path)
        self._in_file = self._size = 0
        self._put(self._head(complete=False))
        while self._limits.keep is not None and len(self.paths) > self._limits.keep:
            self.paths.popleft().unlink(missing_ok=True)

    def _head(self, *, complete: bool) -> bytes:
        more = self._header(self._in_file, complete)
        line = header_line(self._block_tokens, more).encode()
        return line.rstrip(b"\n").ljust(HEADER_BYTES - 1) + b"\n"

    def _close(self, *, complete: bool) -> None:
        file, path = self._file, self.paths[-1] if self.paths else STDOUT
        if file is None:
            return
        self._file = None
        if path == STDOUT:
            return

        def finish() -> None:
            with file:
                file.seek(0)
                file.write(self._head(complete=complete))

        self._guarded(finish)
        if path.suffix == _PARQUET:
            self._guarded(lambda: convert_to_parquet(_lines_of(path), path))
            _lines_of(path).unlink()

    def _put(self, data: bytes) -> None:
        file = self._file
        if file is None:
            raise ValueError("the file is closed")

        def put() -> None:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]

        self._guarded(put)
        self._size += len(data)
        self.bytes += len(data)

    def _guarded(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except BrokenPipeError:
            raise
        except OSError as error:
            self._take_back()
            raise UpstreamError(self._trouble(error), code="disk_failed") from error

    def _take_back(self) -> None:
        """Cut off what was written of a line, so that the file can be read."""
        file, self._file = self._file, None
        if file is None or not self.paths:
            return
        with suppress(OSError), file:
            file.truncate(self._size)
            file.seek(0)
            file.write(self._head(complete=False))

    def _trouble(self, error: OSError) -> str:
        path = self.paths[-1] if self.paths else self._path
        kept = f"; the {self._in_file:,} requests before that are in the file" if self._in_file else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{path}: no space is left{kept}; free some, or limit the file with --bytes and --keep"
        return f"{path}: {error.strerror or error}{kept}"


def _lines_of(path: Path) -> Path:
    """Return the file that is written while a recording runs."""
    return path.with_suffix(".parquet.jsonl") if path.suffix == _PARQUET else path


def _create(path: Path) -> BinaryIO:
    # Without a buffer, what is in the file is known after an error.
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)
