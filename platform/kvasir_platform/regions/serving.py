"""Serves the routers of other cells: one listening address, one session for each link."""

from __future__ import annotations

import logging
from typing import Protocol

from kvasir.core.errors import ProtocolError
from kvasir_platform.regions.connections import CellConnection
from kvasir_platform.regions.session import CellSession, ServingParts

log = logging.getLogger(__name__)


class CellListener(Protocol):
    """Accepts links of other cells."""

    async def start(self) -> int:
        """Bind and listen; return the port. Raise ConfigError if the address cannot be bound."""
        ...

    async def stop(self) -> None:
        """End all links. Idempotent."""
        ...


class CellServing:
    """All links of other cells to this one. `serve` is what the listener calls for each."""

    def __init__(self, parts: ServingParts) -> None:
        self._parts = parts
        self._sessions: set[CellSession] = set()
        self._listener: CellListener | None = None
        self.failures = 0
        """Ticks of sessions that have failed."""

    @property
    def in_flight(self) -> int:
        """Requests of other cells that run here."""
        return sum(session.in_flight for session in self._sessions)

    def listen(self, listener: CellListener) -> None:
        """Set what `start` starts."""
        self._listener = listener

    async def serve(self, connection: CellConnection, deployment: str | None) -> None:
        """Serve one link until it ends; see OnCell."""
        session = CellSession(self._parts, connection, deployment)
        self._sessions.add(session)
        try:
            await session.run()
        except ProtocolError as error:
            log.warning("refused a link: %s", error.message)
            raise
        finally:
            self._sessions.discard(session)

    def tick(self) -> None:
        """See CellSession.tick. A session whose tick fails may not notice the end of its lease, so that it is
        ended; the others go on."""
        for session in list(self._sessions):
            try:
                session.tick()
            except Exception:
                self.failures += 1
                log.exception("the tick of a link failed")
                session.cut("an internal error; the log has the details")

    async def start(self) -> None:
        """Listen. Raise ConfigError if the address cannot be bound."""
        if self._listener is not None:
            await self._listener.start()

    async def stop(self) -> None:
        """End all links, and what runs here for other cells. Idempotent."""
        for session in list(self._sessions):
            session.cut("the cell is stopping")
        if self._listener is not None:
            await self._listener.stop()
