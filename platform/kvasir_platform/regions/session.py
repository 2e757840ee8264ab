"""The serving cell's end of one link: it runs the requests of one router of another cell.

A request that came over a link is given to this cell's own router, never to a link: so no request is sent on
twice, whatever cells know of each other.

How long it may run them without hearing the origin is the lease of `kvasir_platform.regions.lease`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvasir.core.errors import CapacityError, KvasirError, ProtocolError
from kvasir.core.requests import Delta, Request
from kvasir.ports.clock import Clock
from kvasir.ports.router import Lane, RequestPort, RequestSummary
from kvasir_platform.edge.frames import Ended, note_of
from kvasir_platform.edge.remote_router import ended_badly
from kvasir_platform.regions.connections import CellConnection, CellPipe
from kvasir_platform.regions.frames import (
    MAX_DELTAS,
    VERSION,
    CellHello,
    CellWelcome,
    SentRequest,
    ToOrigin,
    decode_to_serving,
    encode_message,
)
from kvasir_platform.regions.lease import fence_rules
from kvasir_platform.regions.needs.media import MediaReceiver
from kvasir_platform.regions.residency import Residency
from kvasir_platform.regions.sharing.asks import LimitAllotted, LimitAsk, TenantSlotAsk, TenantSlots
from kvasir_router.regions.fencing import ExecutorFence
from kvasir_router.regions.reports import INTERVAL_S
from kvasir_router.regions.sharing.spending import CellSpending

log = logging.getLogger(__name__)

MAX_ASKS = 4096
"""Asks of each kind in one message that are answered: two for each of the most tenants."""
MAX_WAITING_DELTAS = 1 << 16
"""Deltas that wait for an origin that reads too slowly. Beyond them its streams are cancelled."""
MAX_WAITING_ANSWERS = 1 << 18
"""Ends and allotments that wait likewise: more than requests at a time. Beyond them the link ends."""


@dataclass(frozen=True, slots=True)
class ServingParts:
    """What all links of a cell share. `report` returns the cell's encoded report, and `spending` what tenants
    with a budget have cost here. `allot` and `grant` answer an ask of a cell for a limit. `residency` says
    where tenants may run, `cells` has the deployment of each other cell, and `tokenizers` the digest of each
    model's tokenizer. `lease_s` and `max_requests` are those of the spec."""

    cell: str
    router: RequestPort
    clock: Clock
    residency: Residency
    report: Callable[[], bytes]
    spending: Callable[[], CellSpending | None]
    allot: Callable[[str, LimitAsk, Callable[[LimitAllotted], None]], None]
    grant: Callable[[str, TenantSlotAsk, Callable[[TenantSlots], None]], None]
    cells: Mapping[str, str]
    tokenizers: Mapping[str, str]
    lease_s: float
    max_requests: int


class CellSession:
    """One router of another cell, from its Hello to the end of its link. It is the sink of all requests of
    that router."""

    def __init__(self, parts: ServingParts, connection: CellConnection, deployment: str | None) -> None:
        self._parts = parts
        self._deployment = deployment
        self._live: dict[str, Request] = {}
        self._media = MediaReceiver()
        self._pending = ToOrigin()
        self._due = False
        self._hello: CellHello | None = None
        self._beat = 0
        self._beats_sent: dict[int, float] = {}
        self._fence = ExecutorFence(fence_rules(parts.lease_s), parts.clock.now())
        self._echo: tuple[float, float] | None = None
        self._reported_s = float("-inf")
        self._unreported = 0
        self._pipe = CellPipe(connection, gather=self._gather, take=self._take)

    @property
    def in_flight(self) -> int:
        """Number of its requests that have not ended."""
        return len(self._live)

    async def run(self) -> None:
        """Serve until the link or the lease ends, and then end all that it runs. Raise ProtocolError for a
        caller that is not a router of a known cell."""
        try:
            reason = await self._pipe.run()
        finally:
            live, self._live = self._live, {}
            for request_id in live:
                self._parts.router.cancel(request_id)
        hello = self._hello
        if hello is None:
            raise ProtocolError(reason)
        log.log(
            logging.WARNING if live else logging.INFO,
            "the link of cell %s ended with %d requests here, which were cancelled: %s",
            hello.cell,
            len(live),
            reason,
        )

    def tick(self) -> None:
        """Send a beat, and a report once a second; end the link if the lease has ended. Call it
        BEATS times in `lease_s`."""
        now = self._parts.clock.now()
        if self._fence.stops(now):
            self._pipe.cut(f"no answer for {self._parts.lease_s:g} s")
        elif self._hello is not None:
            self._beat += 1
            self._beats_sent[self._beat] = now
            self._say().beat = self._beat
            if now - self._reported_s >= INTERVAL_S:
                self._reported_s = now
                self._report()

    def _report(self) -> None:
        try:
            self._say().report = self._parts.report()
            self._say().spending = self._parts.spending()
        except Exception:  # without reports the cell gets no new requests, and those that run go on
            self._unreported += 1
            if self._unreported & (self._unreported - 1) == 0:
                log.exception("no report can be made, %d times", self._unreported)

    def cut(self, reason: str) -> None:
        """End the link, and all that it runs."""
        self._pipe.cut(reason)

    # -- StreamSink, of all its requests

    def on_delta(self, delta: Delta) -> None:
        """See StreamSink."""
        if len(self._pending.deltas) >= MAX_WAITING_DELTAS:
            self._cut_all()
        elif delta.request_id in self._live:
            self._say().deltas.append(delta)

    def lane(self, request_id: str) -> Lane | None:
        """See StreamSink: none, every delta crosses the link as a message."""
        return None

    def on_finish(self, summary: RequestSummary) -> None:
        """See StreamSink."""
        self._end(summary, None)

    def on_error(self, error: KvasirError, summary: RequestSummary) -> None:
        """See StreamSink."""
        self._end(summary, error)

    def _end(self, summary: RequestSummary, error: KvasirError | None) -> None:
        if self._live.pop(summary.request_id, None) is not None:
            # Times of lost attempts are readings of this cell's clock.
            ended = Ended(replace(summary, lost=()), None if error is None else note_of(error))
            self._say().ends.append(ended)

    # -- the link

    def _take(self, data: bytes) -> None:
        frame = decode_to_serving(data)
        if self._hello is None:
            self._greet(frame.hello)
        if (sent_s := self._beats_sent.pop(frame.beat, None)) is not None:
            # Not when the echo came: the origin counts from when it sent it.
            self._fence.heard(sent_s)
            self._beats_sent = {beat: at for beat, at in self._beats_sent.items() if beat > frame.beat}
        self._echo = (frame.sent_s, self._parts.clock.now())
        for piece in frame.pieces:
            self._media.take(piece)
            # It sends more once it knows that this has been read.
            self._say()
        for sent in frame.submits:
            self._submit(sent)
        for ask in frame.asks[:MAX_ASKS]:
            self._allot(ask)
        for slot_ask in frame.slot_asks[:MAX_ASKS]:
            self._grant(slot_ask)
        for request_id in frame.cancels:
            if self._live.pop(request_id, None) is not None:
                self._parts.router.cancel(request_id)
        pending = self._pending
        if len(pending.ends) + len(pending.allotted) + len(pending.slots) > MAX_WAITING_ANSWERS:
            raise ProtocolError("it asks for more than it reads the answers of")

    def _allot(self, ask: LimitAsk) -> None:
        cell = "" if self._hello is None else self._hello.cell
        self._parts.allot(cell, ask, self._allotted)

    def _allotted(self, answer: LimitAllotted) -> None:
        self._say().allotted.append(answer)

    def _grant(self, ask: TenantSlotAsk) -> None:
        cell = "" if self._hello is None else self._hello.cell
        self._parts.grant(cell, ask, self._granted)

    def _granted(self, answer: TenantSlots) -> None:
        self._say().slots.append(answer)

    def _greet(self, hello: CellHello | None) -> None:
        parts = self._parts
        if hello is None or hello.version != VERSION:
            said = "nothing" if hello is None else f"version {hello.version}"
            raise ProtocolError(f"cell {parts.cell} speaks version {VERSION} of the link, the caller {said}")
        expected = parts.cells.get(hello.cell)
        if expected is None or self._deployment not in (None, expected):
            raise ProtocolError(
                f"cell {parts.cell} has no peer {hello.cell!r} of deployment {self._deployment or 'any'}; "
                "correct regions.peers in both specs"
            )
        self._hello = hello
        self._say().welcome = CellWelcome(VERSION, parts.cell, parts.lease_s, dict(parts.tokenizers))

    def _submit(self, sent: SentRequest) -> None:
        parts, now, request = self._parts, self._parts.clock.now(), sent.request
        until = None if sent.remaining_s is None else now + max(0.0, sent.remaining_s)
        request = replace(request, arrival_s=now, deadline_s=until)
        if request.request_id in self._live:
            # One of the two would run where nobody could end it.
            raise ProtocolError(f"request {request.request_id} was sent twice")
        try:
            if len(self._live) >= parts.max_requests:
                raise CapacityError(f"{len(self._live)} requests of the cell run here, the most allowed")
            parts.residency.check(request.tenant, parts.cell)
            request = self._media.attached(request)
            self._live[request.request_id] = request
            parts.router.submit(request, self)
        except KvasirError as error:
            self._refused(request, error)
        # An error of one request must not end the link that serves the others.
        except Exception:
            log.exception("request %s of another cell failed to start", request.request_id)
            self._refused(
                request, KvasirError("Internal error; the log has the details under this request id.")
            )

    def _refused(self, request: Request, error: KvasirError) -> None:
        self._live.pop(request.request_id, None)
        summary = ended_badly(request, error.code, self._parts.clock.now(), refused=True)
        self._say().ends.append(Ended(summary, note_of(error)))

    def _cut_all(self) -> None:
        error = CapacityError("The cell that has the client reads too slowly.", code="edge_overloaded")
        self._pending.deltas.clear()
        live, self._live = self._live, {}
        log.error("cancelled %d streams of a cell that reads too slowly", len(live))
        for request in live.values():
            self._parts.router.cancel(request.request_id)
            summary = ended_badly(request, error.code, self._parts.clock.now())
            self._say().ends.append(Ended(summary, note_of(error)))

    def _say(self) -> ToOrigin:
        self._due = True
        self._pipe.wake()
        return self._pending

    def _gather(self) -> bytes | None:
        if not self._due or self._hello is None:
            return None
        message, rest = self._pending, ToOrigin()
        self._due = False
        if len(message.deltas) > MAX_DELTAS:
            # Ends follow the deltas before them.
            rest.deltas, rest.ends = message.deltas[MAX_DELTAS:], message.ends
            message.deltas, message.ends = message.deltas[:MAX_DELTAS], []
            self._due = True
        self._pending = rest
        if self._echo is not None:
            message.echo = (self._echo[0], self._parts.clock.now() - self._echo[1])
        return encode_message(message)
