"""Carries one end of a session over one connection: sends payloads from the link, and processes and
acknowledges received ones. Router and worker use the same pump, with their own frames."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, NoReturn, Protocol, TypeVar

from kvasir.core.session_link import SessionLink
from kvasir.ports.clock import Clock
from kvasir.ports.session import ConnectionLost

_GRAIN_S = 1e-6
"""The shortest wait: one that ends early by a rounding error would be repeated."""

Out = TypeVar("Out")
In = TypeVar("In")
OutFrame = TypeVar("OutFrame")
In_co = TypeVar("In_co", covariant=True)
OutFrame_contra = TypeVar("OutFrame_contra", contravariant=True)


class Frame(Protocol[In_co]):
    """The common fields of both kinds of frame."""

    @property
    def seq(self) -> int: ...

    @property
    def ack(self) -> int: ...

    @property
    def payload(self) -> In_co | None: ...


class PumpedConnection(Protocol[OutFrame_contra, In_co]):
    """The common methods of both ends of a connection; see kvasir.ports.session."""

    async def send(self, frame: OutFrame_contra, /) -> None: ...

    async def receive(self) -> Frame[In_co]: ...


class SessionPump(Generic[Out, In, OutFrame]):
    """Runs one connection. `run` ends by raising ConnectionLost (the session can continue) or ProtocolError
    (it must not). After `stop`, the link is not used, so the next connection can start at once.

    `process` is called for each payload, exactly once, in order; it must not block or raise anything but
    ProtocolError. A payload is processed, and will be acknowledged, when it returns.
    """

    def __init__(
        self,
        connection: PumpedConnection[OutFrame, In],
        link: SessionLink[Out],
        *,
        frame: Callable[[int, int, Out | None], OutFrame],
        process: Callable[[In], None],
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._link = link
        self._frame = frame
        self._process = process
        self._clock = clock
        self._to_send = asyncio.Event()
        self._to_acknowledge = asyncio.Event()
        self._tasks: list[asyncio.Task[NoReturn]] = []
        self._stopped: str | None = None
        self._beating = False
        self._heard_s = clock.now()

    @property
    def last_received_s(self) -> float:
        """The clock's reading when the last frame of any kind arrived; before the first, when the pump was
        created."""
        return self._heard_s

    def wake(self) -> None:
        """Send payloads that were pushed onto the link."""
        self._to_send.set()

    def beat(self) -> None:
        """Send a frame soon, without a payload if there is none. The peer hears that this end is alive, and
        has nothing to process or to acknowledge."""
        self._beating = True
        self._to_send.set()

    def stop(self, reason: str = "stopped") -> None:
        """Stop using the link; frames in transit are not processed. `run` then raises ConnectionLost with the
        reason. Idempotent; the first reason is kept."""
        self._stopped = self._stopped or reason
        for task in self._tasks:
            task.cancel()

    async def run(self) -> NoReturn:
        """Carry frames until the connection breaks or the peer violates the protocol."""
        if self._stopped is not None:
            raise ConnectionLost(self._stopped)
        self._tasks = [
            asyncio.ensure_future(part) for part in (self._read(), self._write(), self._acknowledge_late())
        ]
        try:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self.stop()
            ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        # A protocol violation takes precedence over the lost connection: a resumed session would repeat it.
        errors: list[Exception] = [error for error in ended if isinstance(error, Exception)]
        errors.sort(key=lambda error: isinstance(error, ConnectionLost))
        raise errors[0] if errors else ConnectionLost(self._stopped)

    async def _read(self) -> NoReturn:
        link, clock = self._link, self._clock
        while True:
            frame = await self._connection.receive()
            self._heard_s = now = clock.now()
            payload = frame.payload
            fresh = link.receive(frame.seq, frame.ack, has_payload=payload is not None, now=now)
            if payload is None or not fresh:
                continue
            self._process(payload)
            if link.ack_due(clock.now()):
                self._to_send.set()
            else:
                self._to_acknowledge.set()

    async def _write(self) -> NoReturn:
        link = self._link
        while True:
            self._to_send.clear()
            while (item := link.take()) is not None:
                self._beating = False
                await self._connection.send(self._frame(item[0], link.take_ack(), item[1]))
            if self._beating or link.ack_due(self._clock.now()):
                self._beating = False
                await self._connection.send(self._frame(link.sent_seq, link.take_ack(), None))
                continue
            await self._to_send.wait()

    async def _acknowledge_late(self) -> NoReturn:
        while True:
            await self._to_acknowledge.wait()
            self._to_acknowledge.clear()
            while (due_s := self._link.ack_due_s) is not None:
                wait_s = due_s - self._clock.now()
                if wait_s <= 0:
                    # Nothing more to wait for: it is sent with the next frame, or as one.
                    self._to_send.set()
                    break
                await self._clock.sleep(max(wait_s, _GRAIN_S))
