"""The origin's end of the link to one other cell: it sends requests there, and says when they may run
elsewhere.

See `kvasir_platform.regions.lease` for what makes it safe to run a lost request again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvasir.core.errors import CapacityError, KvasirError, ProtocolError
from kvasir.core.requests import Delta, Request
from kvasir.ports.clock import Clock
from kvasir.ports.router import RequestSummary
from kvasir.ports.session import ConnectionLost
from kvasir_platform.edge.frames import Ended, error_of
from kvasir_platform.regions.connections import CellConnection, CellDialer, CellPipe
from kvasir_platform.regions.frames import (
    MAX_SUBMITS,
    MAX_TOKENS,
    VERSION,
    CellHello,
    CellWelcome,
    SentRequest,
    ToOrigin,
    ToServing,
    decode_to_origin,
    encode_message,
)
from kvasir_platform.regions.lease import BEATS, fence_rules
from kvasir_platform.regions.needs.media import MAX_WAITING_BYTES, MediaSender, media_bytes
from kvasir_platform.regions.sharing.asks import LimitAllotted, LimitAsk, TenantSlotAsk, TenantSlots
from kvasir_router.regions.fencing import OriginFence
from kvasir_router.regions.reports import CellReport, decode_report
from kvasir_router.regions.sharing.spending import CellSpending

log = logging.getLogger(__name__)

_SUSPECT_SHARE = 0.6
_REDIAL_S = 0.5
_RTT_SAMPLES = 16


class AwaySink(Protocol):
    """Receives what becomes of one request in another cell: deltas, then exactly one of the other three."""

    def on_delta(self, delta: Delta) -> None: ...

    def on_finish(self, summary: RequestSummary) -> None: ...

    def on_error(self, error: KvasirError, summary: RequestSummary) -> None: ...

    def on_lost(self, reason: str) -> None:
        """The cell cannot be reached, and runs the request no more."""
        ...


@dataclass(slots=True)
class _Away:
    request: Request
    sink: AwaySink


class PeerCell:
    """One other cell. `run` keeps the link to it. `on_report` is called with each of its reports,
    `on_allotted` and `on_slots` with its name and each answer about a limit, `on_spending` with what
    tenants have cost there. `lease_s` is `lost_after_s` of all cells. Call everything on one event loop."""

    def __init__(
        self,
        name: str,
        own: CellHello,
        dialer: CellDialer,
        clock: Clock,
        *,
        lease_s: float,
        max_requests: int,
        on_report: Callable[[CellReport], None],
        on_allotted: Callable[[str, LimitAllotted], None],
        on_slots: Callable[[str, TenantSlots], None],
        on_spending: Callable[[str, CellSpending], None],
        network_s: float | None = None,
    ) -> None:
        self.name = name
        self.why = "no connection yet"
        """Why no request can be sent there, "" if one can."""
        self.tokenizers: Mapping[str, str] = {}
        self._own = own
        self._dialer = dialer
        self._clock = clock
        self._lease_s = lease_s
        self._max_requests = max_requests
        self._on_report = on_report
        self._on_allotted = on_allotted
        self._on_slots = on_slots
        self._on_spending = on_spending
        self._stated_s = network_s
        self._rtts: deque[float] = deque(maxlen=_RTT_SAMPLES)
        self._live: dict[str, _Away] = {}
        self._media = MediaSender()
        self._awaiting_media: dict[str, SentRequest] = {}
        self._pending = ToServing()
        self._due = False
        self._pipe: CellPipe | None = None
        self._heard_s = float("-inf")
        self._fence = OriginFence(fence_rules(lease_s), clock.now())
        self._beat = 0

    @property
    def in_flight(self) -> int:
        """Requests of this cell that run there."""
        return len(self._live)

    @property
    def network_s(self) -> float | None:
        """The round trip: as stated, or the shortest of the last ones, which waited for nothing; None until
        it is measured."""
        if self._stated_s is not None:
            return self._stated_s
        return min(self._rtts, default=None)

    @property
    def heard_s(self) -> float:
        """When the cell was heard last, on this cell's clock."""
        return self._heard_s

    def submit(self, request: Request, sink: AwaySink) -> None:
        """Send a request. Raise CapacityError if the cell takes none."""
        if self.why:
            raise CapacityError(f"cell {self.name}: {self.why}", code="no_capacity")
        if len(self._live) >= self._max_requests:
            raise CapacityError(f"{len(self._live)} requests run in cell {self.name}, the most allowed")
        if request.media and self._media.waiting_bytes + media_bytes(request) > MAX_WAITING_BYTES:
            raise CapacityError(f"too many media wait to be sent to cell {self.name}")
        remaining = None if request.deadline_s is None else request.deadline_s - self._clock.now()
        bare = replace(
            request,
            arrival_s=0.0,
            deadline_s=None,
            block_hashes=request.block_hashes[:0],
            key="",
            route_arm=None,
        )
        self._live[request.request_id] = _Away(request, sink)
        if request.media:
            self._awaiting_media[request.request_id] = SentRequest(self._media.add(bare), remaining)
            self._say()
        else:
            self._say().submits.append(SentRequest(bare, remaining))

    def ask(self, ask: LimitAsk | TenantSlotAsk) -> bool:
        """Ask for an allotment of a limit, or for slots. Return whether there is a link."""
        if self.why:
            return False
        if isinstance(ask, LimitAsk):
            self._say().asks.append(ask)
        else:
            self._say().slot_asks.append(ask)
        return True

    def cancel(self, request_id: str) -> None:
        """Cancel a request; its sink is not called any more."""
        if self._live.pop(request_id, None) is not None:
            if self._awaiting_media.pop(request_id, None) is not None:
                self._media.drop(request_id)
            self._say().cancels.append(request_id)

    def tick(self) -> None:
        """Judge by time whether the cell can be reached. Call it a few times in `lease_s`."""
        pipe, now = self._pipe, self._clock.now()
        if pipe is None:
            return
        quiet_s = now - self._heard_s
        if self._fence.gives_up(now):
            pipe.cut(f"no answer for {quiet_s:.1f} s")
        elif quiet_s >= _SUSPECT_SHARE * self._lease_s:
            self.why = f"no answer for {quiet_s:.1f} s"

    async def run(self) -> None:
        """Keep the link until cancelled."""
        while True:
            try:
                connection = await self._dialer.dial()
            except (ConnectionLost, ProtocolError) as error:
                self._note(str(error))
            except Exception as error:  # noqa: BLE001 - this cell is one of several, and dialled again
                self._note(f"it cannot be dialled: {error!r}")
            else:
                await self._serve(connection)
            await self._clock.sleep(_REDIAL_S)

    async def _serve(self, connection: CellConnection) -> None:
        """Run one link to its end, and give its requests back once the cell has ended them."""
        self._pipe = pipe = CellPipe(connection, gather=self._gather, take=self._take)
        self._pending, self._due, self._beat = ToServing(), False, 0
        self._media, self._awaiting_media = MediaSender(), {}
        self._heard_s = self._clock.now()
        self._fence = OriginFence(fence_rules(self._lease_s), self._heard_s)
        self._say().hello = self._own
        try:
            reason = await pipe.run()
        except Exception:  # what runs there must not wait for a link that is not kept any more
            log.exception("the link to cell %s failed", self.name)
            reason = "an internal error; the log has the details"
        finally:
            self._pipe, self.why = None, "the link has ended"
        self._note(reason)
        while self._live and not self._fence.may_repeat(self._clock.now()):
            await self._clock.sleep(self._lease_s / BEATS)
        lost, self._live = self._live, {}
        for away in lost.values():
            try:
                away.sink.on_lost(reason)
            except Exception:  # one client's sink must not keep the others, or the link, from going on
                log.exception("the sink of request %s failed as its cell was lost", away.request.request_id)

    def _note(self, reason: str) -> None:
        if reason != self.why:
            log.warning("cell %s cannot be reached: %s", self.name, reason)
        self.why = reason

    # -- the link

    def _take(self, data: bytes) -> None:
        frame, now = decode_to_origin(data), self._clock.now()
        if frame.welcome is not None:
            self._welcomed(frame.welcome)
        if frame.beat > self._beat and self._fence.beat(now):
            self._fence.heard(now)
            self._beat, self._heard_s, self.why = frame.beat, now, ""
            self._say().beat = frame.beat
        if frame.echo is not None:
            sent_s, held_s = frame.echo
            self._rtts.append(max(0.0, now - sent_s - max(0.0, held_s)))
            self._media.read(sent_s)
            if self._media.can_send:
                self._say()
        for delta in frame.deltas:
            self._said(delta)
        for end in frame.ends:
            self._ended(end)
        if frame.report:
            self._reported(frame.report)
        self._shared(frame)

    def _shared(self, frame: ToOrigin) -> None:
        """Take what concerns limits."""
        for answer in frame.allotted:
            self._on_allotted(self.name, answer)
        for slots in frame.slots:
            self._on_slots(self.name, slots)
        if frame.spending is not None:
            self._on_spending(self.name, frame.spending)

    def _welcomed(self, welcome: CellWelcome) -> None:
        if welcome.version != VERSION or welcome.cell != self.name:
            raise ProtocolError(f"it is cell {welcome.cell!r}, and not {self.name!r}")
        if welcome.lease_s != self._lease_s:
            raise ProtocolError(
                f"its regions.lost_after_s is {welcome.lease_s:g}, and here it is {self._lease_s:g}; set the "
                "same value in all cells"
            )
        self.tokenizers = welcome.tokenizers
        log.info("cell %s is reached", self.name)

    def _said(self, delta: Delta) -> None:
        away = self._live.get(delta.request_id)
        if away is None:
            return
        try:
            away.sink.on_delta(delta)
        except Exception:  # one client's sink must not end the link that serves the others
            log.exception("the sink of request %s failed", delta.request_id)
            self.cancel(delta.request_id)

    def _ended(self, end: Ended) -> None:
        away = self._live.pop(end.summary.request_id, None)
        if away is None:
            return
        try:
            if end.error is None:
                away.sink.on_finish(end.summary)
            else:
                away.sink.on_error(error_of(end.error), end.summary)
        except Exception:  # as for a delta
            log.exception("the sink of request %s failed at its end", end.summary.request_id)

    def _reported(self, data: bytes) -> None:
        report = decode_report(data)
        if report.cell != self.name:
            raise ProtocolError(f"it reports as cell {report.cell!r}")
        self._on_report(report)

    def _say(self) -> ToServing:
        self._due = True
        if self._pipe is not None:
            self._pipe.wake()
        return self._pending

    def _gather(self) -> bytes | None:
        if not self._due:
            return None
        message, rest = self._pending, ToServing()
        self._due = False
        if (count := _fitting(message.submits)) < len(message.submits):
            # A cancelled request must have been submitted before.
            rest.submits, rest.cancels = message.submits[count:], message.cancels
            message.submits, message.cancels = message.submits[:count], []
            self._due = True
        self._pending = rest
        message.sent_s = self._clock.now()
        if self._media.can_send:
            piece, done = self._media.next(message.sent_s)
            message.pieces.append(piece)
            if done:
                message.submits.append(self._awaiting_media.pop(piece.request_id))
            self._due = self._due or self._media.can_send
        return encode_message(message)


def _fitting(submits: Sequence[SentRequest]) -> int:
    """Return how many of the requests one message takes, at least one if there are any."""
    tokens = 0
    for count, sent in enumerate(submits[:MAX_SUBMITS]):
        tokens += len(sent.request.tokens)
        if count and tokens > MAX_TOKENS:
            return count
    return min(len(submits), MAX_SUBMITS)
