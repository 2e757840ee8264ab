"""Receives vLLM's KV events from its ranks over ZeroMQ, and writes them to the worker's record.

The sockets are read on the engine's own event loop: a thread would add a switch between the events and their
step, and `zmq.asyncio` a future for every message. ZeroMQ's descriptor is edge-triggered, so each wake-up
reads until nothing is left.

A record that has lost events is exact again after a rank reports that its cache is empty; see
kvasir_workers.engines.vllm.events.kv_recovery for how the cache is emptied.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial

import msgspec
import zmq

from kvasir_workers.engines.vllm.events.block_marks import with_marks
from kvasir_workers.engines.vllm.events.event_order import EventOrder
from kvasir_workers.engines.vllm.setup.arguments import EVENT_BACKLOG, EventEndpoints
from kvasir_workers.server.holdings import Holdings

log = logging.getLogger(__name__)

_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_CLEARED = "AllBlocksCleared"
_AT_ONCE = 64
_ANSWER_S = 2.0
_QUIET_S = 1.0
_RECONNECT_MS = 10


class KvEvents:
    """Subscribes to `ranks` publishers and writes to `holdings`. All methods run on one event loop.

    `lost` is set while the contents of a rank are partly unknown, as at the start; `holdings` must then be
    incomplete. `backlog` bounds the pending messages of a rank. With `marks`, the engine's salts may
    begin after a shared prefix, or its prompts may have media.
    """

    def __init__(
        self,
        holdings: Holdings,
        endpoints: EventEndpoints,
        ranks: int,
        *,
        backlog: int = EVENT_BACKLOG,
        marks: bool = False,
    ) -> None:
        self._holdings = holdings
        self._marks = marks
        self._context = zmq.Context()
        self._doubtful = set(range(ranks))
        self._exact = asyncio.Event()
        self.lost = asyncio.Event()
        self.lost.set()
        self._warned = 0
        self._ranks = [
            _RankSockets(
                self._context,
                *endpoints.of_rank(rank),
                backlog=backlog,
                take=partial(self._take, rank),
                lost=partial(self._lose, rank),
            )
            for rank in range(ranks)
        ]

    def drain(self) -> None:
        """Record all messages that have arrived; never waits."""
        for rank in self._ranks:
            rank.read_live()

    def probe(self) -> None:
        """Request possibly lost messages from every rank."""
        for rank in self._ranks:
            rank.order.probe()

    async def exact_within(self, seconds: float) -> bool:
        """Return whether every rank has reported an empty cache within `seconds`, without a later loss."""
        try:
            async with asyncio.timeout(seconds):
                await self._exact.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.close()
        self._context.destroy(linger=0)

    def _take(self, rank: int, payload: bytes) -> None:
        if self._marks:
            payload = with_marks(payload)
        try:
            self._holdings.ingest(rank, payload)
        except ValueError as error:
            self._lose(rank, f"vLLM sent invalid KV events: {error}")
            return
        if self._holdings.unnamed > self._warned and rank not in self._doubtful:
            self._warned = self._holdings.unnamed
            log.warning("%d cached blocks could not be recorded: their parents are unknown", self._warned)
        if rank in self._doubtful and _says_empty(payload):
            self._doubtful.discard(rank)
            if not self._doubtful:
                self._holdings.restore()
                self.lost.clear()
                self._exact.set()

    def _lose(self, rank: int, reason: str) -> None:
        log.warning("rank %d: %s; routers predict its contents until its cache was emptied", rank, reason)
        self._doubtful.add(rank)
        self._exact.clear()
        self.lost.set()
        self._holdings.lose(f"rank {rank}: {reason}")


class _RankSockets:
    """One rank's publisher: live messages and replays."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        events: str,
        replay: str,
        *,
        backlog: int,
        take: Callable[[bytes], None],
        lost: Callable[[str], None],
    ) -> None:
        self.order = EventOrder(take=take, ask=self._ask, lost=lost, max_waiting=backlog)
        self._loop = asyncio.get_running_loop()
        self._live = context.socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._replay = context.socket(zmq.DEALER)
        # Requests made without a peer are dropped, not queued.
        self._replay.setsockopt(zmq.IMMEDIATE, 1)
        self._unanswered: asyncio.TimerHandle | None = None
        self._heard = False
        self._quiet = self._loop.call_later(_QUIET_S, self._probe_when_quiet)
        for socket, endpoint, read in (
            (self._live, events, self.read_live),
            (self._replay, replay, self._read_answers),
        ):
            socket.setsockopt(zmq.RCVHWM, backlog)
            # The engine binds seconds later; messages published before this side is connected are replayed.
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            socket.connect(endpoint)
            self._loop.add_reader(int(socket.getsockopt(zmq.FD)), read)

    def read_live(self) -> None:
        """Handle the published messages; never waits."""
        for _ in range(_AT_ONCE):
            frames = _receive(self._live)
            if frames is None:
                return
            _topic, number, payload = frames
            self._heard = True
            self.order.live(int.from_bytes(number, "big"), payload)
        self._loop.call_soon(self.read_live)

    def close(self) -> None:
        """Close the sockets."""
        self._cancel_timeout()
        self._quiet.cancel()
        for socket in (self._live, self._replay):
            self._loop.remove_reader(int(socket.getsockopt(zmq.FD)))
            socket.close(linger=0)

    def _read_answers(self) -> None:
        for _ in range(_AT_ONCE):
            frames = _receive(self._replay)
            if frames is None:
                return
            _delimiter, _topic, number, payload = frames
            if number == _END:
                self._cancel_timeout()
                self.order.answer_ended()
            else:
                self.order.answer(int.from_bytes(number, "big"), payload)
        self._loop.call_soon(self._read_answers)

    def _ask(self, number: int) -> None:
        self._cancel_timeout()
        self._unanswered = self._loop.call_later(_ANSWER_S, self.order.unanswered)
        with contextlib.suppress(zmq.Again):
            self._replay.send_multipart([b"", number.to_bytes(_NUMBER_BYTES, "big")], zmq.NOBLOCK)
        # Sending may consume the notification of a reply that has arrived meanwhile.
        self._loop.call_soon(self._read_answers)

    def _cancel_timeout(self) -> None:
        if self._unanswered is not None:
            self._unanswered.cancel()
            self._unanswered = None

    def _probe_when_quiet(self) -> None:
        # A lost message that is followed by none leaves no gap.
        if self._heard:
            self._heard = False
        else:
            self.order.probe()
        self._quiet = self._loop.call_later(_QUIET_S, self._probe_when_quiet)


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """Return the next message, None if there is none or the socket is closed."""
    if socket.closed:
        return None
    try:
        frames: list[bytes] = socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    return frames


def _says_empty(payload: bytes) -> bool:
    """Return whether one of the message's events is that the cache was cleared."""
    _ts, events, *_ = msgspec.msgpack.decode(payload)
    return any(event.get("type") == _CLEARED for event in events if isinstance(event, dict))
