"""One API call while it runs: its legs in the router, their measurements, and the answer they fill.

A call is one leg per prompt. The legs are the router's sinks; they run on the router's event loop inside
its fan-out, so they do nothing but measure, frame and write, and they call the router back only from a
later turn of the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, Request, Usage
from kvasir.native import StreamGaps
from kvasir.ports.clock import Clock
from kvasir.ports.router import Lane, RequestPort, RequestSummary
from kvasir.telemetry.families.updated import Histogram
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.reasons import CONTENT_FILTER, OK
from kvasir.telemetry.spans import UNTRACED, SpanRecorder, TraceContext
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.answer import Answer, add_usage

_log = logging.getLogger(__name__)


class PromptStream:
    """The sink of one prompt; `base` is the index of its first choice in the answer. The first of its output
    came at `first_s`, and `usage` is what the router has said of the rest; `open` has its choices that go on,
    and `cut` tells whether the gateway has ended one that the engine has not."""

    __slots__ = (
        "_answer",
        "_gaps",
        "_generation",
        "_now",
        "base",
        "cut",
        "first_s",
        "live",
        "open",
        "request",
        "usage",
    )

    def __init__(
        self,
        generation: Generation,
        answer: Answer,
        request: Request,
        *,
        base: int,
        inter_token: Histogram,
        now: Callable[[], float],
    ) -> None:
        self._generation = generation
        self._answer = answer
        self._now = now
        self._gaps = [
            StreamGaps(inter_token.bounds, inter_token.counts, inter_token.total)
            for _ in range(request.sampling.n)
        ]
        self.base = base
        self.request = request
        self.live = False
        self.usage = Usage(prompt_tokens=len(request.tokens))
        self.first_s: float | None = None
        self.open = set(range(request.sampling.n))
        self.cut = False

    def on_delta(self, delta: Delta) -> None:
        """Measure the gap between tokens and pass the delta on."""
        index = delta.index
        count = len(delta.token_ids)
        if count:
            now = self._now()
            self._gaps[index].add(count, now)
            if self.first_s is None:
                self.first_s = now
        if delta.usage is not None:
            self.usage = delta.usage
        if delta.finish is not None:
            self.open.discard(index)
            self._generation.end_if_done(self)
        try:
            self._answer.delta(self.base + index, delta)
        except Exception as error:  # noqa: BLE001 - the router's fan-out serves every other stream too
            self._generation.broken(error)

    def lane(self, request_id: str) -> Lane | None:
        """See StreamSink."""
        if len(self._gaps) > 1 or not self._gaps[0].count:
            return None
        return self._answer.lane(self.base, self._gaps[0])

    @property
    def tokens(self) -> int:
        """Tokens that were passed on, over either path."""
        return sum(gaps.count for gaps in self._gaps)

    def on_finish(self, summary: RequestSummary) -> None:
        """The leg ended well."""
        self._generation.leg_finished(self, summary)

    def on_error(self, error: KvasirError, summary: RequestSummary) -> None:
        """The leg ended badly, and with it the call."""
        self._generation.leg_failed(self, error, summary)


class Generation:
    """One call. Ends exactly once: finished, failed, or gone with its client. `on_end` hears of it when none
    of its legs runs any more. `replaced` is called with the error of one that has had no output: it returns
    whether something else answers in its place, after `on_end`. `trace` is what `spans` began for it."""

    def __init__(
        self,
        exchange: Exchange,
        answer: Answer,
        *,
        router: RequestPort,
        metrics: Metrics,
        spans: SpanRecorder | None,
        clock: Clock,
        on_end: Callable[[Generation], None],
        replaced: Callable[[KvasirError], bool] | None = None,
        trace: TraceContext = UNTRACED,
    ) -> None:
        self._exchange = exchange
        self._answer = answer
        self._router = router
        self._metrics = metrics
        self._spans = spans
        self._clock = clock
        self._on_end = on_end
        self._replaced = replaced
        self._trace = trace
        self._legs: list[PromptStream] = []
        self._summaries: list[RequestSummary] = []
        self._usage = Usage()
        self._submitted_s = 0.0
        self._worked = self._missed = False
        self.error = ""
        """The code of what the router ended it with, "" where that was the last token."""
        self._ended = False

    @property
    def worked(self) -> bool:
        """Whether a worker may have had any of it. False when `on_end` is called for one that was refused,
        or that failed before it was its turn."""
        return self._worked

    @property
    def usage(self) -> Usage:
        """What its ended legs used: all that it did when `on_end` is called, however it ended."""
        return self._usage

    def start(self, requests: list[Request]) -> None:
        """Submit all legs, or none: raises what the router raises."""
        base = 0
        inter_token = self._metrics.inter_token(requests[0].model)
        self._submitted_s = self._clock.now()
        self._exchange.on_gone = self.gone
        for request in requests:
            if self._ended:
                break
            leg = PromptStream(
                self, self._answer, request, base=base, inter_token=inter_token, now=self._clock.now
            )
            base += request.sampling.n
            leg.live = True
            self._legs.append(leg)
            try:
                self._router.submit(request, leg)
            except KvasirError as error:
                leg.live = False
                self.error = error.code
                self._cancel_live(error.code)
                # Its other legs were cancelled in the turn of the loop in which they came.
                self._worked = False
                self._end()
                raise

    def leg_finished(self, leg: PromptStream, summary: RequestSummary) -> None:
        """Count the leg; the last one completes the answer."""
        self._leg_ended(leg, summary)
        if not self._ended and not self._runs:
            self._end()
            self._answer.finish(self._usage, server_timing(summary, self._submitted_s))

    def leg_failed(self, leg: PromptStream, error: KvasirError, summary: RequestSummary) -> None:
        """End the call with the error and stop the other legs."""
        self.error = error.code
        self._leg_ended(leg, summary)
        if self._ended:
            return
        silent = not any(each.tokens for each in self._legs)
        self._end()
        self._cancel_later(error.code)
        if not (silent and self._replaced is not None and self._replaced(error)):
            self._answer.fail(error)

    def end_choice(self, index: int) -> None:
        """Choice `index` of the answer has been ended here, and its end passed on. A leg whose choices have
        all ended is taken off its worker in a later turn of the loop; the last one completes the answer."""
        for leg in self._legs:
            if leg.base <= index < leg.base + leg.request.sampling.n:
                leg.cut = leg.cut or index - leg.base in leg.open
                leg.open.discard(index - leg.base)
                self.end_if_done(leg)

    def end_if_done(self, leg: PromptStream) -> None:
        """See to the end of a leg whose worker may go on with choices that nobody wants any more."""
        if leg.cut and not leg.open:
            asyncio.get_running_loop().call_soon(self._end_leg, leg)

    def broken(self, error: Exception) -> None:
        """The answer could not be written for a fault of ours."""
        if not self._ended:
            _log.error("an answer failed", extra={"request_id": self._exchange.request_id}, exc_info=error)
            self.abandon(KvasirError("Internal error; the log has the details under this request id."))

    def abandon(self, error: KvasirError) -> None:
        """End the call with `error` for a reason outside the router."""
        if not self._ended:
            self._end()
            self._answer.fail(error)
            self._cancel_later(error.code)

    def gone(self, code: str) -> None:
        """The client left or was cut: free the request on every worker at once."""
        self._cancel_live(code)
        if not self._ended:
            self._end()

    @property
    def _runs(self) -> bool:
        return any(leg.live for leg in self._legs)

    def _end(self) -> None:
        self._ended = True
        self._settle()

    def _cancel_later(self, code: str) -> None:
        if self._runs:
            asyncio.get_running_loop().call_soon(self._cancel_live, code)

    def _cancel_live(self, code: str) -> None:
        for leg in self._legs:
            if leg.live:
                self._router.cancel(leg.request.request_id)
                self._leg_ended(leg, self._cut(leg, code))

    def _end_leg(self, leg: PromptStream) -> None:
        """Take a leg off its worker that the gateway wants nothing more of."""
        if leg.live:
            self._router.cancel(leg.request.request_id)
            self.leg_finished(leg, self._cut(leg, CONTENT_FILTER))

    def _cut(self, leg: PromptStream, code: str) -> RequestSummary:
        """What the gateway knows of a leg that it ended itself, and that may have come to a worker."""
        self._worked = True
        request = leg.request
        return RequestSummary(
            request_id=request.request_id,
            model=request.model,
            outcome=code,
            arrival_s=request.arrival_s,
            finished_s=self._clock.now(),
            first_token_s=leg.first_s,
            usage=replace(leg.usage, output_tokens=leg.tokens),
            trace_context=request.trace_context,
            slo=request.slo,
            route_arm=request.route_arm,
        )

    def _leg_ended(self, leg: PromptStream, summary: RequestSummary) -> None:
        leg.live = False
        self._worked = self._worked or summary.outcome == OK or summary.routed_s is not None
        if summary.outcome != OK and summary.usage.output_tokens < leg.tokens:
            # A worker tells what was used with its last word, which a leg that failed may not have had.
            summary = replace(summary, usage=replace(leg.usage, output_tokens=leg.tokens))
        self._usage = add_usage(self._usage, summary.usage)
        met = self._metrics.request_finished(summary)
        if self._spans is not None:
            self._missed = self._missed or met is False
            self._summaries.append(summary)
        if self._ended:
            self._settle()

    def _settle(self) -> None:
        """Tell of the call when it has ended and nothing of it runs any more."""
        if self._runs:
            return
        if self._spans is not None and self._summaries and (self._trace.whole or self._missed):
            self._spans.record(
                self._trace,
                self._summaries,
                now_s=self._clock.now(),
                admitted_s=self._submitted_s,
                missed=self._missed,
            )
        self._on_end(self)
        # Legs refer to the call: a cycle would keep the request's body until a collection.
        self._legs = []


def server_timing(summary: RequestSummary, submitted_s: float) -> bytes:
    """The Server-Timing header line of a finished request, in milliseconds; of a call with several, that of
    the one that ended last."""
    parts = [("admit", submitted_s - summary.arrival_s, "")]
    routed, prefilled, first = summary.routed_s, summary.prefill_done_s, summary.first_token_s
    if routed is not None:
        parts.append(("queue", routed - submitted_s, ""))
        parts.append(("route", summary.route_s, ""))
        if prefilled is not None:
            parts.append(("prefill", prefilled - routed, ""))
    if summary.tier_s > 0 or summary.usage.tier_tokens:
        parts.append(("tier", summary.tier_s, f';desc="{summary.usage.tier_tokens} tokens"'))
    if summary.transfer_s > 0 or summary.usage.transferred_bytes:
        parts.append(("transfer", summary.transfer_s, f';desc="{summary.usage.transferred_bytes} bytes"'))
    if first is not None:
        parts.append(("ttft", first - summary.arrival_s, ""))
        parts.append(("decode", summary.finished_s - first, ""))
    parts.append(("total", summary.finished_s - summary.arrival_s, ""))
    shown = ", ".join([f"{name};dur={max(0.0, s) * 1e3:.2f}{desc}" for name, s, desc in parts])
    return b"server-timing: %b\r\n" % shown.encode()
