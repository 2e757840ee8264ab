"""How cells reach each other, and what one end of a link does: messages in order until the link breaks.

gRPC in production, memory in tests. Both ends write what has gathered since their last message, so that a
turn of the loop costs one message, however many streams it concerns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from kvasir.core.errors import ProtocolError
from kvasir.ports.session import ConnectionLost


class CellConnection(Protocol):
    """One end of a link."""

    async def send(self, data: bytes) -> None:
        """Send one message; wait while the other side is slow. Raise ConnectionLost."""
        ...

    async def receive(self) -> bytes:
        """Return the next message, in order. Raise ConnectionLost."""
        ...

    async def close(self) -> None:
        """Idempotent; the other side sees ConnectionLost."""
        ...


class CellDialer(Protocol):
    """Connects to one other cell."""

    async def dial(self) -> CellConnection:
        """Return a link. Raise ConnectionLost if the cell does not answer, ProtocolError if it refuses, or
        proves another identity."""
        ...


OnCell = Callable[[CellConnection, str | None], Coroutine[Any, Any, None]]
"""Serves one link until it ends. The deployment that the caller's certificate names is None without
certificates."""


class CellPipe:
    """Runs one end of a link. `gather` returns the next message, None if there is nothing to send; `take`
    handles a received one, and may raise ProtocolError."""

    def __init__(
        self,
        connection: CellConnection,
        *,
        gather: Callable[[], bytes | None],
        take: Callable[[bytes], None],
    ) -> None:
        self._connection = connection
        self._gather = gather
        self._take = take
        self._due = asyncio.Event()
        self._cut = asyncio.Event()
        self._reason = ""

    def wake(self) -> None:
        """Have what is there gathered and sent."""
        self._due.set()

    def cut(self, reason: str) -> None:
        """End the link."""
        self._reason = self._reason or reason
        self._cut.set()

    async def run(self) -> str:
        """Send and receive until the link ends; return why it ended. The connection is then closed."""
        tasks = [
            asyncio.create_task(self._read(), name="cell-read"),
            asyncio.create_task(self._write(), name="cell-write"),
            asyncio.create_task(self._cut.wait(), name="cell-cut"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await self._connection.close()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for result in ended:
            if isinstance(result, ConnectionLost | ProtocolError):
                self._reason = self._reason or str(result)
            elif isinstance(result, Exception):
                raise result
        return self._reason or "closed"

    async def _read(self) -> None:
        while True:
            self._take(await self._connection.receive())

    async def _write(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            while (data := self._gather()) is not None:
                await self._connection.send(data)
