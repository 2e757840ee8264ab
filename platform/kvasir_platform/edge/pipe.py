"""One end of the link between an edge and its core. Frames of one event loop iteration leave in one write at
its end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Generic, cast

from kvasir.core.errors import ProtocolError
from kvasir_platform.edge.frames import Frame, Frames, ToCore, ToEdge, frames

log = logging.getLogger(__name__)


class FramePipe(asyncio.Protocol, Generic[Frame]):
    """Sends what `gather` returns, and passes frames of kind `kind` to `receive`; an exception of `receive`
    ends the link.

    `gather` is called at the end of each event loop iteration in which `wake` was called; None sends nothing.
    `refuse` is called with a frame that exceeds the size limit. `lost` is called once, after the last frame.
    """

    def __init__(
        self,
        kind: type[Frame],
        *,
        gather: Callable[[], ToCore | ToEdge | None],
        receive: Callable[[Frame], None],
        refuse: Callable[[ToCore | ToEdge], None],
        lost: Callable[[], None],
    ) -> None:
        self._frames = Frames(kind)
        self._gather = gather
        self._receive = receive
        self._refuse = refuse
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._due = False

    async def connect(self, sock: socket.socket) -> None:
        """Start on one end of a socket pair, which the pipe closes."""
        await self._loop.create_unix_connection(lambda: self, sock=sock)

    @property
    def waiting(self) -> int:
        """Bytes that the peer has not read yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def wake(self) -> None:
        """Schedule a write."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send the gathered frames immediately."""
        self._due = False
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        message = self._gather()
        if message is not None:
            for each in frames(message, self._refuse):
                transport.write(each)

    def close(self) -> None:
        """Send the buffered frames, then close."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close without sending buffered frames."""
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The link is up."""
        self._transport = cast("asyncio.WriteTransport", transport)
        self.wake()

    def data_received(self, data: bytes) -> None:
        """Whole frames go on."""
        try:
            received = self._frames.take(data)
        except ProtocolError as error:
            log.error("the link between an edge and its core is broken: %s", error)
            self.abort()
            return
        for each in received:
            self._receive(each)

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side is gone."""
        self._lost()
