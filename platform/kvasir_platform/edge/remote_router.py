"""The router in another process, as the gateway of an edge sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kvasir.core.errors import CapacityError, KvasirError, RequestError
from kvasir.core.messages import EncodedStep, WorkerFrame
from kvasir.core.requests import Delta, Request, Usage
from kvasir.native import StreamTokens
from kvasir.ports.router import NO_BROWNOUT, BrownoutView, RequestSummary, ServedAdapter, StreamSink
from kvasir.wire.codec import decode_to_router
from kvasir_platform.edge.frames import CoreStatus, ToEdge, error_of
from kvasir_router.fast_path import FastPath

if TYPE_CHECKING:
    from kvasir_platform.edge.core_link import CoreLink

log = logging.getLogger(__name__)


_CORE = ""
"""The only worker name that an edge has; request ids identify streams."""


class _Live(NamedTuple):
    """A request that the core has, or receives at the end of this event loop iteration."""

    request: Request
    sink: StreamSink


class _RemoteAdapters:
    """`kvasir.ports.router.AdapterCatalog` of the core."""

    def __init__(self, newest: Callable[[], Mapping[str, ServedAdapter]]) -> None:
        self._newest = newest

    def served(self) -> Mapping[str, ServedAdapter]:
        """See AdapterCatalog."""
        return self._newest()


class RemoteRouter:
    """`kvasir.ports.router.RequestPort` over a link. `now` reads the clock that both processes share.

    The core accepts or refuses a request after `submit` has returned: a refusal goes to the sink's
    `on_error`, in a summary marked `refused`. The readiness and pressure of the core are at most ~50 ms old.
    Without `fast_path` all deltas take the ordinary path.
    """

    def __init__(self, link: CoreLink, now: Callable[[], float], *, fast_path: bool = True) -> None:
        self._link = link
        self._now = now
        self._live: dict[str, _Live] = {}
        self._fast_path = FastPath(_place) if fast_path else None
        self._core_status = _no_status("no status received from the router yet")
        self.adapters = _RemoteAdapters(lambda: self._core_status.adapters)

    @property
    def in_flight(self) -> int:
        """Running requests."""
        return len(self._live)

    def submit(self, request: Request, sink: StreamSink) -> None:
        """See RequestPort. Raises CapacityError if the core cannot be reached, RequestError
        (`duplicate_request`)."""
        if self._link.lost:
            raise gone()
        if self._link.full:
            raise CapacityError("The router reads too slowly from its edges.", code="no_capacity")
        if request.request_id in self._live:
            raise RequestError(
                f"request {request.request_id} is in flight already", status=500, code="duplicate_request"
            )
        self._live[request.request_id] = _Live(request, sink)
        self._link.say().submits.append(request)

    def cancel(self, request_id: str) -> None:
        """See RequestPort."""
        if self._live.pop(request_id, None) is not None:
            self._close_lane(request_id)
            self._link.say().cancels.append(request_id)

    def brownout(self, model: str) -> BrownoutView:
        """See RequestPort."""
        return self._core_status.brownouts.get(model, NO_BROWNOUT)

    def not_ready_reason(self) -> str | None:
        """See RequestPort."""
        return self._core_status.missing

    def refusing_reason(self) -> str | None:
        """See RequestPort."""
        return self._core_status.refusing

    def not_ready_models(self) -> dict[str, str | None]:
        """See RequestPort."""
        return dict(self._core_status.missing_by_model)

    def shares(self) -> Mapping[str, float]:
        """Return the share of each canary, by route."""
        return self._core_status.shares

    # -- the link's side

    def heard(self, frame: ToEdge) -> None:
        """Handle a message of the core."""
        for delta in frame.deltas:
            self._said(delta)
        for each in frame.fast_path:
            self._on_fast_path(each)
        for end in frame.ends:
            note = end.error
            self._end(end.summary, None if note is None else error_of(note))
        if frame.core_status is not None:
            self._core_status = frame.core_status

    def _said(self, delta: Delta) -> None:
        found = self._live.get(delta.request_id)
        if found is None:
            return
        try:
            found.sink.on_delta(delta)
            if self._fast_path is not None:
                self._fast_path.offer(delta.request_id, delta, found.sink)
        except Exception:  # one client's sink must not end the link that serves the others
            log.exception("the sink of request %s failed", delta.request_id)
            self.cancel(delta.request_id)

    def _on_fast_path(self, message: bytes) -> None:
        frame = decode_to_router(message)
        if isinstance(frame, WorkerFrame) and isinstance(frame.payload, EncodedStep):
            step = frame.payload
            rest = (
                step.decode(None)
                if self._fast_path is None
                else self._fast_path.rest(_CORE, step, self._now())
            )
            for delta in () if rest is None else rest.deltas:
                self._said(delta)

    def refuse(self, request_id: str) -> None:
        """Handle a request that exceeds the frame limit."""
        found = self._live.get(request_id)
        if found is not None:
            error = RequestError(
                "The request exceeds the size limit of the router.", status=413, code="request_too_large"
            )
            self._end(self._summary(found.request, error, refused=True), error)

    def lost(self) -> None:
        """Handle the loss of the core: end every request."""
        self._core_status = _no_status("the router has ended")
        for found in list(self._live.values()):
            error = gone()
            self._end(self._summary(found.request, error), error)

    def _end(self, summary: RequestSummary, error: KvasirError | None) -> None:
        found = self._live.pop(summary.request_id, None)
        if found is None:
            return
        self._close_lane(summary.request_id)
        try:
            if error is None:
                found.sink.on_finish(summary)
            else:
                found.sink.on_error(error, summary)
        except Exception:  # as for a delta
            log.exception("the sink of request %s failed at its end", summary.request_id)

    def _close_lane(self, request_id: str) -> None:
        if self._fast_path is not None:
            self._fast_path.close(request_id)

    def _summary(self, request: Request, error: KvasirError, *, refused: bool = False) -> RequestSummary:
        return ended_badly(request, error.code, self._now(), refused=refused)


def _place(request_id: str, delta: Delta) -> tuple[str, str, StreamTokens]:
    return _CORE, request_id, StreamTokens(delta.offset + len(delta.token_ids))


def ended_badly(request: Request, code: str, now: float, *, refused: bool = False) -> RequestSummary:
    """Return the summary of a request for which the router sent none."""
    return RequestSummary(
        request_id=request.request_id,
        model=request.model,
        outcome=code,
        arrival_s=request.arrival_s,
        finished_s=now,
        usage=Usage(),
        trace_context=request.trace_context,
        slo=request.slo,
        refused=refused,
        route_arm=request.route_arm,
    )


def gone() -> CapacityError:
    """Return the error for everything that needs the lost core."""
    return CapacityError("The router has ended.", code="router_lost")


def _no_status(reason: str) -> CoreStatus:
    return CoreStatus(reason, reason, {}, {})
