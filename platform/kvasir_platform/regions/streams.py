"""The sinks of requests in a router over several cells: what stands between a cell and the client.

A request that runs at home costs one attribute per delta, and its plain deltas keep their fast path. One that
was sent to another cell is followed token by token, so that it can go on in a third cell: from the prompt and
the output so far where that is exact, else replayed and compared, by the rules for lost workers
(`kvasir_router.requests.continuation`). Only cells with the same revision of the model continue a stream.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from kvasir.core.errors import CapacityError, KvasirError, RequestError, UpstreamError
from kvasir.core.requests import Delta, Request, Resumed, Usage
from kvasir.ports.router import Lane, RequestSummary, StreamSink
from kvasir_router.requests.continuation import ChoiceOutput, ContinuationMode, ReplayFilter, way_on
from kvasir_router.requests.state import says_something

OWN_LOAD = frozenset(("tenant_queue_full", "tenant_over_share"))
"""Refusals for what the tenant itself has running, which no other cell changes."""


class StreamRouter(Protocol):
    """Decides what becomes of requests that ended without output, or whose cell was lost."""

    def ended(self, stream: CellStream, *, answered: bool = True) -> None:
        """The stream has ended, or is about to. `answered`: by its cell."""
        ...

    def lost(self, stream: CellStream) -> None:
        """The stream has lost its cell."""
        ...

    def moved(self, stream: CellStream, error: KvasirError, summary: RequestSummary | None) -> bool:
        """Return whether the stream goes on in another cell, in a later turn of the loop. Without a summary,
        its cell was lost."""
        ...

    def explained(self, stream: CellStream, error: KvasirError) -> KvasirError:
        """Return the error of a request that ends at home, with why no other cell has taken it if it needed
        something that they lack."""
        ...

    def broken(self, stream: CellStream, error: KvasirError) -> None:
        """The stream's cell does not keep its order: cancel it there and fail it, in a later turn."""
        ...

    def now(self) -> float: ...

    @property
    def home(self) -> str:
        """The name of this cell."""
        ...


class CellStream:
    """One request of this cell. `cell` runs it, at `revision` of the model ("" if unknown); `tried` are the
    cells that could not, and `moves` counts the cells that were lost. `followed`: what the client has of it
    is known, because it has been in another cell."""

    __slots__ = (
        "_first_s",
        "_is_broken",
        "_outputs",
        "_replay",
        "_router",
        "begun",
        "cell",
        "followed",
        "moves",
        "reason",
        "request",
        "revision",
        "sent_s",
        "sink",
        "tried",
    )

    def __init__(self, request: Request, sink: StreamSink, router: StreamRouter) -> None:
        self.request = request
        self.sink = sink
        self._router = router
        self.cell = ""
        self.revision = ""
        self.reason = ""
        self.tried: set[str] = set()
        self.moves = 0
        self.begun = False
        self.followed = False
        self.sent_s = request.arrival_s
        self._first_s: float | None = None
        self._outputs: list[ChoiceOutput] = []
        self._replay: ReplayFilter | None = None
        self._is_broken = False

    # -- StreamSink

    def on_delta(self, delta: Delta) -> None:
        """See StreamSink."""
        if self.followed:
            passed = self._new_part(delta)
            if passed is None:
                return
            delta = passed
        self.begun = True
        self.sink.on_delta(delta)

    def lane(self, request_id: str) -> Lane | None:
        """See StreamSink."""
        return None if self.followed else self.sink.lane(request_id)

    def on_finish(self, summary: RequestSummary) -> None:
        """See StreamSink."""
        self._router.ended(self)
        self.sink.on_finish(self._shown(summary))

    def on_error(self, error: KvasirError, summary: RequestSummary) -> None:
        """See StreamSink."""
        if self._can_move(error) and self._router.moved(self, error, summary):
            return
        error = self._router.explained(self, error)
        self._router.ended(self)
        self.sink.on_error(error, self._shown(summary))

    def on_lost(self, reason: str) -> None:
        """See AwaySink."""
        self._router.lost(self)
        error: KvasirError = UpstreamError(f"Cell {self.cell} was lost: {reason}.", code="cell_lost")
        if self.begun and way_on(self.request.sampling) is ContinuationMode.NEITHER:
            error = UpstreamError(
                f"{error.message} A stream that is sampled without a seed and with penalties, forbidden "
                "words, a bound on reasoning or several choices cannot be continued exactly in another cell; "
                "send the request again.",
                code="cell_lost",
            )
        elif self._router.moved(self, error, None):
            return
        self.fail(error)

    def fail(self, error: KvasirError) -> None:
        """End it with an error of this router."""
        self._router.ended(self, answered=False)
        sent = sum(output.progress.count for output in self._outputs)
        summary = RequestSummary(
            self.request.request_id,
            self.request.model,
            error.code,
            self.request.arrival_s,
            self._router.now(),
            routed_s=self.sent_s if self.begun or self.moves else None,
            usage=Usage(prompt_tokens=len(self.request.tokens), output_tokens=sent),
            trace_context=self.request.trace_context,
            slo=self.request.slo,
            route_arm=self.request.route_arm,
        )
        self.sink.on_error(error, summary)

    # -- what is sent

    def follow(self) -> None:
        """Begin to follow what the client has of it; it has nothing yet, or is followed already."""
        if not self.followed:
            self.followed = True
            self._outputs = [ChoiceOutput() for _ in range(self.request.sampling.n)]

    def next_request(self) -> Request:
        """Return the request for the next cell: the client's, or what goes on from its output."""
        self._replay = None
        if not any(output.progress.count for output in self._outputs):
            return self.request
        if way_on(self.request.sampling) is ContinuationMode.EXTEND:
            progress = self._outputs[0].progress
            return replace(self.request, resumed=Resumed(tuple(progress.tokens), progress.characters))
        self._replay = ReplayFilter(self._outputs)
        return self.request

    def _new_part(self, delta: Delta) -> Delta | None:
        """Return the part of a delta that the client does not have, None for none. A cell that repeats a
        stream differently, or leaves out a token, ends it."""
        if self._is_broken:
            return None
        if (fault := self._fault(delta)) is not None:
            self._is_broken = True
            error = UpstreamError(f"Cell {self.cell} broke the stream: {fault}.", code="protocol_error")
            self._router.broken(self, error)
            return None
        if self._replay is not None:
            delta = self._replay.rest(delta)
        if not says_something(delta) and not delta.last:
            return None
        if self._first_s is None and delta.token_ids:
            self._first_s = self._router.now()
        self._outputs[delta.index].add(delta)
        return delta

    def _fault(self, delta: Delta) -> str | None:
        """Return why a delta cannot be the next one of its choice, None if it can."""
        if not 0 <= delta.index < len(self._outputs):
            return f"choice {delta.index} came of {len(self._outputs)}"
        if self._replay is not None:
            return self._replay.fault(delta)
        count = self._outputs[delta.index].progress.count
        return None if delta.offset == count else f"token {delta.offset} came where {count} was next"

    def _can_move(self, error: KvasirError) -> bool:
        if isinstance(error, RequestError) or error.code in OWN_LOAD:
            return False
        if error.code == "shutting_down" and self.followed:
            return not self.begun or way_on(self.request.sampling) is not ContinuationMode.NEITHER
        return not self.begun and isinstance(error, CapacityError)

    def _shown(self, summary: RequestSummary) -> RequestSummary:
        """Return the summary by this cell's clock, with what is this cell's own."""
        if not self.followed:
            return summary
        request, worker = self.request, summary.decode_worker
        home = self.cell == self._router.home
        return replace(
            summary,
            arrival_s=request.arrival_s,
            finished_s=self._router.now(),
            routed_s=None if summary.routed_s is None else self.sent_s,
            prefill_done_s=None,
            first_token_s=self._first_s,
            started_s=self.sent_s,
            prefill_worker=None,
            decode_worker=worker if home or worker is None else f"{self.cell}/{worker}",
            migrations=summary.migrations + self.moves,
            key=request.key,
            route_arm=request.route_arm,
            lost=(),
        )
