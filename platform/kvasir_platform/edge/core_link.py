"""An edge's end of the link: the services of the core, behind the ports that the gateway uses.

Where only the core can decide, the edge accepts immediately: a request that admission refuses ends with the
same error a moment later, before any part of a response has been sent.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from kvasir.ports.clock import Clock
from kvasir_platform.edge.frames import EdgeWelcome, ErrorNote, ToCore, ToEdge
from kvasir_platform.edge.pipe import FramePipe
from kvasir_platform.edge.remote_limits import RemoteLimits
from kvasir_platform.edge.remote_pages import RemoteNames, RemotePages
from kvasir_platform.edge.remote_router import RemoteRouter, gone
from kvasir_platform.edge.stored_responses import RemoteResponses

MAX_WAITING_BYTES = 64 << 20
"""Limit of bytes queued for a core that does not read; above it, requests are refused."""


class CoreLink:
    """The link of one edge. `figures` renders the metrics of the edge. `on_drain` is called when the core
    asks the edge to drain; `on_lost` when the link is lost, after all requests have ended, and then `ended`
    is set. Without `fast_path` all deltas take the ordinary path."""

    def __init__(self, clock: Clock, *, fast_path: bool = True) -> None:
        self._pending = ToCore()
        self._said = False
        self._pipe = FramePipe(
            ToEdge, gather=self._gather, receive=self._receive, refuse=self._refuse, lost=self._on_pipe_lost
        )
        self._welcome: asyncio.Future[EdgeWelcome] = asyncio.get_running_loop().create_future()
        self.lost = False
        self.ended = asyncio.Event()
        self.router = RemoteRouter(self, clock.now, fast_path=fast_path)
        self.limits = RemoteLimits(self)
        self.pages = RemotePages(self)
        self.responses = RemoteResponses(self)
        self.names = RemoteNames(self)
        self.figures: Callable[[], bytes] = bytes
        self.on_drain: Callable[[], None] = _nothing
        self.on_lost: Callable[[], None] = _nothing

    async def connect(self, sock: socket.socket) -> EdgeWelcome:
        """Start on the edge's end of a socket pair; return the welcome of the core. Raise CapacityError if
        the core is lost first."""
        await self._pipe.connect(sock)
        return await self._welcome

    def say(self) -> ToCore:
        """Return the frame that leaves at the end of this event loop iteration, to add to."""
        self._said = True
        self._pipe.wake()
        return self._pending

    @property
    def full(self) -> bool:
        """Whether the core has not read for too long."""
        return self._pipe.waiting > MAX_WAITING_BYTES

    def started(self, host: str, port: int) -> None:
        """Report that the edge listens."""
        self.say().started = (host, port)

    def failed(self, error: ErrorNote) -> None:
        """Report that the edge cannot serve."""
        self.say().failed = error
        self._pipe.flush()

    def close(self) -> None:
        """Send buffered frames, then close. Idempotent."""
        self._pipe.flush()
        self._pipe.close()

    def _gather(self) -> ToCore | None:
        if not self._said:
            return None
        message, self._pending, self._said = self._pending, ToCore(), False
        return message

    def _receive(self, frame: ToEdge) -> None:
        self.router.heard(frame)
        for leave in frame.leaves:
            self.limits.heard(leave)
        for page in frame.shown:
            self.pages.heard(page)
        for name in frame.stopped:
            self.responses.stopped(name)
        for found in frame.found:
            self.responses.heard(found)
        for number in frame.scrapes:
            self.say().figures.append((number, self.figures()))
        if frame.welcome is not None and not self._welcome.done():
            self._welcome.set_result(frame.welcome)
        if frame.beat:
            self.say().beat = frame.beat
        if frame.drain:
            self.on_drain()

    def _refuse(self, message: ToCore | ToEdge) -> None:
        if isinstance(message, ToCore):
            for request in message.submits:
                self.router.refuse(request.request_id)

    def _on_pipe_lost(self) -> None:
        self.lost = True
        self.router.lost()
        self.limits.lost()
        self.pages.lost()
        self.responses.lost()
        if not self._welcome.done():
            self._welcome.set_exception(gone())
        self.on_lost()
        self.ended.set()


def _nothing() -> None:
    """Ignores the result."""
