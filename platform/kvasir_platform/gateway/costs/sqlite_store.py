"""Costs in a SQLite file, for one machine. Queries run in threads, so that a slow disk holds up no stream."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import TypeVar

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir.ports.stores.costs import CostBatch, CostGroup, CostRecords, WorkerHour, WorkSums

T = TypeVar("T")

_VERSION = 1
_LABELS = ", ".join(CostGroup._fields)
_SUMS = ", ".join(WorkSums._fields)
_COLUMNS = ", ".join(WorkerHour._fields)
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS work (
    {CostGroup._fields[0]} INTEGER NOT NULL,
    {", ".join(f"{name} TEXT NOT NULL" for name in CostGroup._fields[1:])},
    {", ".join(f"{name} REAL NOT NULL" for name in WorkSums._fields)},
    PRIMARY KEY ({_LABELS})
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS worker_hours (
    hour INTEGER NOT NULL, pool TEXT NOT NULL, worker TEXT NOT NULL, router TEXT NOT NULL,
    {", ".join(f"{name} REAL NOT NULL" for name in WorkerHour._fields[4:])},
    PRIMARY KEY (hour, pool, worker, router)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS writers (
    writer TEXT PRIMARY KEY, number INTEGER NOT NULL, hour INTEGER NOT NULL
) WITHOUT ROWID;
"""
_ADD = (
    f"INSERT INTO work ({_LABELS}, {_SUMS}) VALUES ({', '.join('?' * 15)}) "  # noqa: S608 - constants
    f"ON CONFLICT ({_LABELS}) DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in WorkSums._fields)
)
_REPLACE = f"INSERT OR REPLACE INTO worker_hours ({_COLUMNS}) VALUES ({', '.join('?' * 9)})"  # noqa: S608
_BUSY_S = 5.0
"""Seconds to wait for another process that uses the file."""


class SqliteCosts:
    """`kvasir.ports.stores.costs.CostStore` in a file that only its owner can read. Raise ConfigError for a
    file that cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._file = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = NORMAL")
            version = self._file.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise ConfigError(
                    f"cost.file {path}: written by another version of Kvasir (format {version}, and this one "
                    f"uses {_VERSION}); name another file"
                )
            self._file.executescript(_SCHEMA)
            self._file.execute(f"PRAGMA user_version = {_VERSION}")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"cost.file {path}: {error}; name a file that can be written") from error

    async def add(self, batch: CostBatch) -> None:
        """See CostStore."""
        await self._run(lambda file: _add(file, batch))

    async def read(self, since: int, until: int) -> CostRecords:
        """See CostStore."""
        return await self._run(lambda file: _read(file, since, until))

    async def forget(self, before: int) -> None:
        """See CostStore."""
        await self._run(lambda file: _forget(file, before))

    async def close(self) -> None:
        """See CostStore."""
        await self._run(lambda file: file.close())

    async def _run(self, act: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.to_thread(self._locked, act)

    def _locked(self, act: Callable[[sqlite3.Connection], T]) -> T:
        with self._lock:
            try:
                return act(self._file)
            except sqlite3.Error as error:
                raise UpstreamError(f"cost.file {self._path}: {error}", code="costs_unavailable") from error


def _add(file: sqlite3.Connection, batch: CostBatch) -> None:
    file.execute("BEGIN IMMEDIATE")
    try:
        known = file.execute("SELECT number FROM writers WHERE writer = ?", (batch.writer,)).fetchone()
        if known is None or known[0] < batch.number:
            hours = [group.hour for group in batch.work] + [each.hour for each in batch.workers]
            file.execute(
                "INSERT OR REPLACE INTO writers (writer, number, hour) VALUES (?, ?, ?)",
                (batch.writer, batch.number, max(hours, default=0)),
            )
            file.executemany(_ADD, [(*group, *sums) for group, sums in batch.work.items()])
            file.executemany(_REPLACE, batch.workers)
        file.execute("COMMIT")
    except BaseException:
        # A full disk has ended the transaction, and its error must not be replaced by one that says so.
        if file.in_transaction:
            file.execute("ROLLBACK")
        raise


def _read(file: sqlite3.Connection, since: int, until: int) -> CostRecords:
    span = "WHERE hour >= ? AND hour < ?"
    work = file.execute(f"SELECT {_LABELS}, {_SUMS} FROM work {span}", (since, until))  # noqa: S608
    workers = file.execute(f"SELECT {_COLUMNS} FROM worker_hours {span}", (since, until))  # noqa: S608
    return CostRecords(
        {CostGroup(*row[:6]): WorkSums(*row[6:]) for row in work}, [WorkerHour(*row) for row in workers]
    )


def _forget(file: sqlite3.Connection, before: int) -> None:
    for table in ("work", "worker_hours", "writers"):
        file.execute(f"DELETE FROM {table} WHERE hour < ?", (before,))  # noqa: S608 - constants
