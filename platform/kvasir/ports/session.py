"""The port of session connections, which carry frames in order until they break."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from kvasir.core.kv import KvSnapshotPart
from kvasir.core.messages import Hello, RouterFrame, Welcome, WorkerFrame


class ConnectionLost(Exception):
    """The connection is closed, by either side. The session can continue; the detail is in args."""


class RouterConnection(Protocol):
    """The router's end. The dialer returns it after the exchange of Hello and Welcome."""

    @property
    def welcome(self) -> Welcome:
        """The worker's answer to the Hello."""
        ...

    async def send(self, frame: RouterFrame) -> None:
        """Send one frame; wait while the peer is slow. Raises ConnectionLost."""
        ...

    async def receive(self) -> WorkerFrame:
        """Return the next frame, in order. Raises ConnectionLost."""
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
        """Refuse the router: its dialer raises ProtocolError with `reason`, and the connection ends."""
        ...

    async def send(self, frame: WorkerFrame) -> None: ...

    async def receive(self) -> RouterFrame: ...

    async def close(self) -> None: ...


class Dialer(Protocol):
    """How a router reaches a worker: gRPC, or memory in tests."""

    async def dial(self, address: str, hello: Hello) -> RouterConnection:
        """Connect and exchange Hello and Welcome. Raises ConnectionLost if there is no answer within the
        dialer's timeout (a frozen worker accepts connections and does not answer), and ProtocolError with the
        reason if the peer refuses."""
        ...

    def snapshot(self, address: str, epoch: int) -> AsyncGenerator[KvSnapshotPart, None]:
        """Yield all blocks that the worker holds, in parts, the last one marked. A caller that stops early
        must close the generator. `epoch` is the latest that the router knows, 0 for none. Raises
        ConnectionLost if the call breaks or the worker is temporarily unable to answer, and ProtocolError if
        it has no record or a part is malformed."""
        ...
