"""One physical connection of a session: it carries frames in order until it breaks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from kvasir.core.kv import KvSnapshotPart
from kvasir.core.messages import Hello, RouterFrame, Welcome, WorkerFrame


class ConnectionLost(Exception):
    """The connection is gone, whoever closed it. The session may live on; the detail is in args."""


class RouterConnection(Protocol):
    """The router's end. The dialer has exchanged Hello and Welcome before it hands this out."""

    @property
    def welcome(self) -> Welcome:
        """The worker's answer to our Hello."""
        ...

    async def send(self, frame: RouterFrame) -> None:
        """Hand over one frame; waits while the peer is slow. Raises ConnectionLost."""
        ...

    async def receive(self) -> WorkerFrame:
        """The next frame, in order. Raises ConnectionLost."""
        ...

    async def close(self) -> None:
        """Idempotent; the peer sees ConnectionLost."""
        ...


class WorkerConnection(Protocol):
    """The worker's end; `hello` has been read. `accept` or `refuse` must be called before anything else."""

    @property
    def hello(self) -> Hello: ...

    async def accept(self, welcome: Welcome) -> None:
        """Answer the Hello. Raises ConnectionLost."""
        ...

    async def refuse(self, reason: str) -> None:
        """Turn the router away: its dialer raises ProtocolError with `reason`, and this ends."""
        ...

    async def send(self, frame: WorkerFrame) -> None: ...

    async def receive(self) -> RouterFrame: ...

    async def close(self) -> None: ...


class Dialer(Protocol):
    """How a router reaches a worker: gRPC, or memory in tests."""

    async def dial(self, address: str, hello: Hello) -> RouterConnection:
        """Connect and exchange Hello and Welcome. Raises ConnectionLost when nobody answers within a short
        time of the dialer's own (a frozen worker takes connections and says nothing), and ProtocolError when
        the peer refuses (with its reason)."""
        ...

    def snapshot(self, address: str, epoch: int) -> AsyncGenerator[KvSnapshotPart, None]:
        """All that the worker holds, in parts, the last one marked so; to be closed by who gives up on it
        half-way. `epoch` is the newest that the router knows of, 0 for none. Raises ConnectionLost when the
        call breaks or the worker cannot answer for the time being, and ProtocolError when it never will
        (it keeps no record) or a part is malformed."""
        ...
