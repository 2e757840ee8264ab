"""The logs of a deployment on this machine: which file has a worker's, its last lines, and what is appended.

A log is rotated: a router's is renamed, a worker's is emptied after its end was copied, each to the same name
with `.1` after it."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, tzinfo
from pathlib import Path

from kvasir.core.errors import ConfigError
from kvasir_workers.pool.output_log import OWN_NAME

POLL_S = 0.25
_WORKER = re.compile(r"worker-(?P<pool>.+)-\d+\.log")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,]\d+)?(Z|[+-]\d\d:\d\d)?")
_MOST_LINE = 1 << 16


def find_log(folder: Path, source: str) -> Path:
    """Return the log of a worker, of the newest worker of a pool, or of another process, such as `router`.
    Raises ConfigError, which says what there is."""
    logs = sorted(folder.glob("*.log"), key=_modified, reverse=True)
    pools = {path: found["pool"] for path in logs if (found := _WORKER.fullmatch(path.name))}
    for path in logs:
        if path not in pools and path.stem == source:
            return path
    for path, pool in pools.items():
        if source == pool or (source.startswith(f"{pool}-") and _is_of(path, source)):
            return path
    names = sorted({path.stem for path in logs if path not in pools} | set(pools.values()))
    raise ConfigError(
        f"no log of {source!r} is in {folder}; name a worker as `kvasir get workers` shows it, or one of: "
        f"{', '.join(names) or 'nothing, as nothing has run yet'}"
    )


def last_lines(path: Path, count: int | None, since: datetime | None) -> list[str]:
    """Return the last `count` lines of a log and its earlier part, None: all, from a time on."""
    kept: deque[str] = deque(maxlen=count)
    chosen = SinceFilter(since)
    for part in (path.with_name(f"{path.name}.1"), path):
        with suppress(FileNotFoundError), part.open(encoding="utf-8", errors="replace") as stream:
            kept.extend(line for line in (each.rstrip("\n") for each in stream) if chosen.keeps(line))
    return list(kept)


class SinceFilter:
    """Keeps lines from a time on. A line without a time is kept with the one before it. Times without a zone
    are in that of `since`."""

    def __init__(self, since: datetime | None) -> None:
        self._since = since
        self._keeping = since is None

    def keeps(self, line: str) -> bool:
        """Whether the next line is kept."""
        if self._since is not None and (when := time_in(line, self._since.tzinfo)) is not None:
            self._keeping = when >= self._since
        return self._keeping


def time_in(line: str, zone: tzinfo | None) -> datetime | None:
    """Return the time near the beginning of a line of a log."""
    found = _TIME.search(line[:120])
    if found is None:
        return None
    offset = "+00:00" if found[3] == "Z" else found[3] or ""
    try:
        when = datetime.fromisoformat(f"{found[1]}T{found[2]}{offset}")
    except ValueError:
        return None
    return when if when.tzinfo is not None else when.replace(tzinfo=zone)


def appended(path: Path, stop: threading.Event) -> Iterator[str]:
    """Yield whole lines as they are written, until `stop` is set. Begins at the end of the file."""
    at, inode = _end(path)
    partial = b""
    while not stop.wait(POLL_S):
        with suppress(FileNotFoundError):
            status = path.stat()
            if status.st_ino != inode or status.st_size < at:
                at, inode = 0, status.st_ino
            if status.st_size == at:
                continue
            with path.open("rb") as stream:
                stream.seek(at)
                data = partial + stream.read(status.st_size - at)
                at = status.st_size
            *whole, partial = data.split(b"\n")
            partial = partial[-_MOST_LINE:]
            for line in whole:
                yield line.decode("utf-8", "replace")


def _end(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_size, status.st_ino


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_of(path: Path, source: str) -> bool:
    """Whether a log, or its earlier part, says that it is that of this worker; others may name it too."""
    own = f"{OWN_NAME} {source},".encode()
    for part in (path, path.with_name(f"{path.name}.1")):
        with suppress(FileNotFoundError):
            if own in part.read_bytes():
                return True
    return False
