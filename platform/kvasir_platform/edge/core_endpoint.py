"""The core's end of the link to one edge: it does for the edge what a gateway in this process would do.

It is the sink of all of the edge's requests, so that a delta costs the core one append, and a step one write
per edge. An edge that does not read does not delay others: its streams are cancelled when too many bytes wait
for it.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kvasir.core.errors import CapacityError, KvasirError
from kvasir.core.requests import Delta, Request
from kvasir.native import Relay
from kvasir.ports.limits import Grant, LimitRefusal, RateLimits
from kvasir.ports.responses import ResponseStore
from kvasir.ports.router import Lane, RequestPort, RequestSummary
from kvasir_platform.edge.core_pages import CorePages
from kvasir_platform.edge.core_status import core_status_of
from kvasir_platform.edge.edge_metrics import EdgeMetrics
from kvasir_platform.edge.frames import (
    CoreStatus,
    EdgeWelcome,
    Ended,
    ErrorNote,
    LimitRequest,
    LimitResponse,
    LimitSettled,
    PageResponse,
    ResponseFound,
    ToCore,
    ToEdge,
    note_of,
)
from kvasir_platform.edge.pipe import FramePipe
from kvasir_platform.edge.remote_router import ended_badly
from kvasir_platform.edge.stored_responses import EdgeResponses
from kvasir_platform.gateway.serving.request_names import RequestNames

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 << 20
"""Limit of bytes that wait for an edge that does not read."""


@dataclass(frozen=True, slots=True)
class CoreParts:
    """The parts of the core that all edges share. `now` reads the clock that all processes share, `shares`
    the share of each canary."""

    router: RequestPort
    limits: RateLimits
    responses: ResponseStore
    names: RequestNames
    pages: CorePages
    figures: EdgeMetrics
    now: Callable[[], float]
    shares: Callable[[], Mapping[str, float]] = dict


class CoreEndpoint:
    """One edge, from its first message to its last, identified by `name`. `on_started` is called with the
    address where it listens, `on_failed` with the reason why it cannot. `on_lost` is called once, after the
    link is closed and all resources of the edge are released. Create and call it on the router's event loop.
    """

    def __init__(
        self,
        name: str,
        core: CoreParts,
        *,
        on_started: Callable[[str, int], None],
        on_failed: Callable[[ErrorNote], None],
        on_lost: Callable[[], None],
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self.name = name
        self.unheard = 0
        """Heartbeats since the last message from the edge."""
        self._core = core
        self._on_started = on_started
        self._on_failed = on_failed
        self._on_lost = on_lost
        self._max_waiting_bytes = max_waiting_bytes
        self._live: dict[str, Request] = {}
        self._grants: dict[int, Grant] = {}
        self._responses = EdgeResponses(core.responses, found=self._found, stop=self._stop_response)
        self._pending = ToEdge()
        self._relay = Relay(self._relayed)
        self._said = False
        self._sent_status: CoreStatus | None = None
        self._lost = False
        self._pipe = FramePipe(
            ToCore, gather=self._gather, receive=self._receive, refuse=self._refuse, lost=self._on_pipe_lost
        )

    async def connect(self, sock: socket.socket, welcome: EdgeWelcome) -> None:
        """Start on the core's end of a socket pair."""
        self._core.figures.join(self.name, self._scrape)
        self._say().welcome = welcome
        await self._pipe.connect(sock)

    @property
    def in_flight(self) -> int:
        """Number of its requests that have not ended."""
        return len(self._live)

    def send_status(self, core_status: CoreStatus) -> None:
        """Send the status, unless the edge already has it."""
        if core_status != self._sent_status:
            self._sent_status = core_status
            self._say().core_status = core_status

    def beat(self, number: int) -> None:
        """Send a heartbeat that the edge must echo."""
        self.unheard += 1
        self._say().beat = number

    def drain(self) -> None:
        """Drain the edge."""
        self._say().drain = True

    def abort(self) -> None:
        """Close the link immediately."""
        self._pipe.abort()

    # -- StreamSink, of all its requests

    def on_delta(self, delta: Delta) -> None:
        """See StreamSink."""
        if len(self._relay):
            # Fast-path deltas of this iteration precede it.
            self._pipe.flush()
        self._say().deltas.append(delta)

    def lane(self, request_id: str) -> Lane | None:
        """See StreamSink."""
        return self._relay.lane(request_id) if request_id in self._live else None

    def on_finish(self, summary: RequestSummary) -> None:
        """See StreamSink."""
        self._end(summary, None)

    def on_error(self, error: KvasirError, summary: RequestSummary) -> None:
        """See StreamSink."""
        self._end(summary, error)

    def _end(self, summary: RequestSummary, error: KvasirError | None) -> None:
        if self._live.pop(summary.request_id, None) is not None:
            self._say().ends.append(Ended(summary, None if error is None else note_of(error)))

    # -- requests of the edge

    def _receive(self, frame: ToCore) -> None:
        core = self._core
        self.unheard = 0
        for request in frame.submits:
            self._submit(request)
        for request_id in frame.cancels:
            if self._live.pop(request_id, None) is not None:
                core.router.cancel(request_id)
        for client_id, names in frame.named:
            core.names.note(client_id, names)
        for settled in frame.settled:
            self._settle(settled)
        for take in frame.takes:
            core.limits.take(take.tenant, take.quota, take.tokens, partial(self._leave, take))
        for ask in frame.asks:
            core.pages.show(ask, self._show)
        for kept in frame.kept:
            self._responses.keep(kept.response)
        for asked in frame.responses:
            self._responses.ask(asked)
        self._news(frame)

    def _news(self, frame: ToCore) -> None:
        for number, text in frame.figures:
            self._core.figures.heard(self.name, number, text)
        if frame.started is not None:
            self._on_started(*frame.started)
        if frame.failed is not None:
            self._on_failed(frame.failed)

    def _submit(self, request: Request) -> None:
        if self._pipe.waiting > self._max_waiting_bytes:
            self._refused(request, _too_slow())
            return
        self._live[request.request_id] = request
        try:
            self._core.router.submit(request, self)
        except KvasirError as error:
            del self._live[request.request_id]
            self._refused(request, error)
        # An error of one request must not close the link that serves the others.
        except Exception:
            log.exception("request %s failed to start", request.request_id)
            self._live.pop(request.request_id, None)
            message = "Internal error; the log has the details under this request id."
            self._refused(request, KvasirError(message))

    def _refused(self, request: Request, error: KvasirError) -> None:
        summary = ended_badly(request, error.code, self._core.now(), refused=True)
        self._say().ends.append(Ended(summary, note_of(error)))

    def _leave(self, take: LimitRequest, verdict: Grant | LimitRefusal) -> None:
        if isinstance(verdict, LimitRefusal):
            self._say().leaves.append(LimitResponse(take.number, refusal=verdict))
        elif self._lost:
            self._core.limits.release(verdict)
        else:
            self._grants[take.number] = verdict
            self._say().leaves.append(LimitResponse(take.number, grant=verdict))

    def _settle(self, settled: LimitSettled) -> None:
        grant = self._grants.pop(settled.number, None)
        if grant is None:
            return
        if settled.tokens is None:
            self._core.limits.release(grant)
        else:
            self._core.limits.settle(grant, settled.tokens)

    def _scrape(self, number: int) -> None:
        self._say().scrapes.append(number)

    def _show(self, page: PageResponse) -> None:
        # A client that was answered that an adapter is loaded may use it at once, at the same edge.
        self.send_status(core_status_of(self._core.router, self._core.shares()))
        self._say().shown.append(page)

    def _found(self, found: ResponseFound) -> None:
        self._say().found.append(found)

    def _stop_response(self, name: str) -> None:
        self._say().stopped.append(name)

    # -- the link

    def _say(self) -> ToEdge:
        """Return the message that is sent at the end of this iteration of the loop, to append to."""
        if not self._said:
            self._said = True
            self._pipe.wake()
        return self._pending

    def _relayed(self) -> None:
        self._say()

    def _gather(self) -> ToEdge | None:
        streams = self._pending.deltas or len(self._relay)
        if streams and self._pipe.waiting > self._max_waiting_bytes:
            self._cut_all()
        if not self._said:
            return None
        if len(self._relay):
            self._pending.fast_path.append(self._relay.take())
        message, self._pending, self._said = self._pending, ToEdge(), False
        return message

    def _refuse(self, message: ToCore | ToEdge) -> None:
        """Cancel the request of a delta that is too large for a frame."""
        if isinstance(message, ToEdge):
            if message.fast_path:
                self._cut_all()
            for delta in message.deltas:
                self._cut(delta.request_id, _too_slow())

    def _cut_all(self) -> None:
        """Cancel all streams of an edge that does not read, and drop their pending deltas."""
        log.error("edge %s reads too slowly; cancelled its %d streams", self.name, len(self._live))
        self._pending.deltas.clear()
        self._relay.take()
        for request_id in list(self._live):
            self._cut(request_id, _too_slow())

    def _cut(self, request_id: str, error: KvasirError) -> None:
        request = self._live.pop(request_id, None)
        if request is not None:
            self._core.router.cancel(request_id)
            summary = ended_badly(request, error.code, self._core.now())
            self._say().ends.append(Ended(summary, note_of(error)))

    def _on_pipe_lost(self) -> None:
        core = self._core
        self._lost = True
        # The relay has a callback to this object and would keep it alive.
        self._relay = Relay(_nobody)
        self._responses.lost()
        live, self._live = self._live, {}
        for request_id in live:
            core.router.cancel(request_id)
        grants, self._grants = self._grants, {}
        for grant in grants.values():
            # The tokens used by its requests are unknown; the charged tokens are the maximum.
            core.limits.settle(grant, grant.tokens)
        core.figures.leave(self.name)
        self._pending = ToEdge()
        self._on_lost()


def _nobody() -> None:
    """Does nothing after the end of the link."""


def _too_slow() -> CapacityError:
    return CapacityError("The gateway reads too slowly; the stream was cancelled.", code="edge_overloaded")
