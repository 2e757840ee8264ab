"""One OpenTelemetry span tree per call, written when the call has ended.

Times come from the summaries of its requests, so serving starts no span. Only the ids of the root span are
generated at the start of the call, because workers and the client receive them: each worker adds the spans of
its legs (leg_spans.py). Without a collector, there is no recorder, and OpenTelemetry is not imported.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvasir.core.values import value
from kvasir.ports.clock import Rng
from kvasir.ports.router import RequestSummary
from kvasir.telemetry.reasons import CONTENT_FILTER, OK

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import SpanContext

Attributes = Mapping[str, str | int]

_NS = 1_000_000_000
MOST_PER_S = 1_000
"""Traces recorded whole in one second, unless a recorder is told otherwise."""
_TAIL = "kvasir=tail"
"""The tracestate of a call that is recorded only if it turns out to be slow or failed."""
_LENGTH = 55
"""Characters of a traceparent, whose last one has the flag `sampled` as its lowest bit."""
_SAMPLED_DIGITS = frozenset("13579bdf")
_TRACE_DIGITS, _SPAN_DIGITS = 32, 16
_TOGETHER = 32
"""Calls whose contexts are made at once, which takes less time than one by one."""


@value
class TraceContext:
    """W3C trace context of one call: the client's `traceparent` and `tracestate`, and the `traceparent` of
    the call's own span; each "" if absent. A call that begins a trace of its own, and was not chosen to be
    recorded whole, has the tracestate of tail sampling. `onward` is the trace context for workers: the
    nearest traceparent, then a space and the tracestate if there is one."""

    parent: str = ""
    state: str = ""
    own: str = ""
    onward: str = ""

    @property
    def whole(self) -> bool:
        """Whether the call is recorded however it ends."""
        return self.own[_LENGTH - 1 :] in _SAMPLED_DIGITS

    @classmethod
    def of(cls, parent: str, state: str, own: str = "") -> TraceContext:
        """Return the context of a call with these headers and this span."""
        nearest = own or parent
        return cls(parent, state, own, f"{nearest} {state}" if nearest and state else nearest)


UNTRACED = TraceContext()
"""The context of a call in no trace."""


def is_sampled(traceparent: str) -> bool:
    """Whether the spans of this well-formed `traceparent` are to be recorded; a tracestate may follow it."""
    return traceparent[_LENGTH - 1] in _SAMPLED_DIGITS


def recorded_parent(onward: str, *, slow_or_failed: bool) -> str:
    """Return the `traceparent` under which something that ended is recorded, "" if it is not: in a sampled
    trace, or under tail sampling if it was slow or failed. `onward` is what a call passes on."""
    # Once for each request, most of which are neither.
    if not onward or onward[_LENGTH - 1] in _SAMPLED_DIGITS:
        return onward[:_LENGTH]
    if not slow_or_failed or onward[_LENGTH + 1 :] != _TAIL:
        return ""
    return f"{onward[: _LENGTH - 2]}01"


class SpanRecorder:
    """Records calls as spans. `record` never blocks, because the processor exports in its own thread.

    Of calls without a client's trace, `share` are recorded whole, at most `most_per_s` of those that begin in
    one second, and of the others those that missed their SLO or failed."""

    def __init__(
        self,
        processor: SpanProcessor,
        service: str,
        wall_ns: Callable[[], int] = time.time_ns,
        rng: Rng | None = None,
        *,
        share: float = 1.0,
        most_per_s: int = MOST_PER_S,
    ) -> None:
        # Ids have to be unique, not secret, and the system's generator takes ten times as long.
        self._rng = random.Random() if rng is None else rng  # noqa: S311
        self._share = share
        self._most_per_s = most_per_s
        self._second = self._begun = 0
        self._fresh: list[TraceContext] = []
        # Imported here so that a process without tracing never loads the SDK.
        from kvasir.telemetry.otlp.ended_spans import EndedSpans

        self._spans = EndedSpans(processor, {"service.name": service}, self._rng)
        self._wall_ns = wall_ns

    def begin(self, parent: str = "", state: str = "") -> TraceContext:
        """Return the context of a call that starts under the client's `parent`, if any. A trace that the
        client does not sample is not sampled here."""
        if not self._fresh:
            self._fresh = self._contexts()
        fresh = self._fresh.pop()
        whole = is_sampled(parent) if parent else self._begins_whole()
        if not parent and not whole:
            return fresh
        trace_id = (parent or fresh.own)[3:35]
        return TraceContext.of(parent, state, f"00-{trace_id}-{fresh.own[36:52]}-0{'1' if whole else '0'}")

    def record(
        self,
        trace: TraceContext,
        summaries: Sequence[RequestSummary],
        *,
        now_s: float,
        admitted_s: float,
        missed: bool,
    ) -> None:
        """Write the spans of an ended call, which had at least one request, if it was begun `whole` or under
        tail sampling has `missed` its SLO.

        `trace` is the context from `begin`, `now_s` the current reading of the clock of the summaries, and
        `admitted_s` its reading when the gateway submitted the requests to the router.
        """
        if not trace.whole and (trace.state != _TAIL or not missed):
            return
        offset = self._wall_ns() - int(now_s * _NS)

        def wall(seconds: float) -> int:
            return offset + int(seconds * _NS)

        spans = self._spans
        parent = spans.parent(trace.parent, trace.state) if trace.parent else None
        own = spans.context(int(trace.own[3:35], 16), int(trace.own[36:52], 16), parent)
        for summary in summaries:
            if len(summaries) == 1:
                self._parts(summary, own, admitted_s, wall)
                continue
            prompt = spans.child(own)
            self._parts(summary, prompt, admitted_s, wall)
            times = wall(summary.arrival_s), wall(summary.finished_s)
            spans.add("prompt", prompt, own, times, _attributes([summary]))
        outcome = _outcome(summaries)
        times = (
            wall(min(each.arrival_s for each in summaries)),
            wall(max(each.finished_s for each in summaries)),
        )
        error = None if outcome in (OK, CONTENT_FILTER) else outcome
        spans.add("request", own, parent, times, _attributes(summaries), serves=True, error=error)

    def close(self) -> None:
        """Export pending spans, within the timeout of the exporter."""
        self._spans.close()

    def _contexts(self) -> list[TraceContext]:
        """Return contexts of calls that begin traces of their own, and are not recorded whole."""
        found = []
        length = _TRACE_DIGITS + _SPAN_DIGITS
        size = length * _TOGETHER // 2
        text = self._rng.getrandbits(8 * size).to_bytes(size, "big").hex()
        for at in range(0, len(text), length):
            # All digits of an id are zero, which W3C's trace context does not allow, in one of 2**64.
            own = f"00-{text[at : at + _TRACE_DIGITS]}-{text[at + _TRACE_DIGITS : at + length]}-00"
            found.append(TraceContext("", _TAIL, own, f"{own} {_TAIL}"))
        return found

    def _begins_whole(self) -> bool:
        if self._share < 1.0 and self._rng.random() >= self._share:
            return False
        second = self._wall_ns() // _NS
        if second != self._second:
            self._second, self._begun = second, 0
        self._begun += 1
        return self._begun <= self._most_per_s

    def _parts(
        self, summary: RequestSummary, parent: SpanContext, admitted_s: float, wall: Callable[[float], int]
    ) -> None:
        for name, start, end, attributes in _parts(summary, admitted_s):
            times = wall(start), wall(max(start, end))
            self._spans.add(name, self._spans.child(parent), parent, times, attributes)


_Part = tuple[str, float, float, Attributes]


def _outcome(summaries: Sequence[RequestSummary]) -> str:
    return next((each.outcome for each in summaries if each.outcome != OK), OK)


def _attributes(summaries: Sequence[RequestSummary]) -> Attributes:
    """Return the attributes of a span for its requests."""
    shown: dict[str, str | int] = (
        {"kvasir.request_id": summaries[0].request_id} if len(summaries) == 1 else {}
    )
    return shown | {
        "kvasir.model": summaries[0].model,
        "kvasir.outcome": _outcome(summaries),
        "kvasir.prompt_tokens": sum(each.usage.prompt_tokens for each in summaries),
        "kvasir.cached_tokens": sum(each.usage.cached_tokens for each in summaries),
        "kvasir.output_tokens": sum(each.usage.output_tokens for each in summaries),
        "kvasir.retries": sum(each.retries for each in summaries),
        "kvasir.migrations": sum(each.migrations for each in summaries),
    }


def _parts(summary: RequestSummary, admitted_s: float) -> Iterator[_Part]:
    """Yield the child spans of a request for the stages that it reached: name, start, end, attributes."""
    yield "admit", summary.arrival_s, admitted_s, {}
    routed = summary.routed_s
    yield "queue", admitted_s, summary.finished_s if routed is None else routed, {}
    if routed is None:
        return
    yield (
        "route",
        routed,
        routed + summary.route_s,
        {
            "kvasir.reason": summary.reason,
            "kvasir.prefill_worker": summary.prefill_worker or "",
            "kvasir.decode_worker": summary.decode_worker or "",
            "kvasir.predicted_cached_tokens": summary.predicted_cached_tokens,
        },
    )
    if summary.tier_s:
        yield "tier", routed, routed + summary.tier_s, {"kvasir.tier_tokens": summary.usage.tier_tokens}
    prefilled = summary.prefill_done_s
    if prefilled is None and summary.first_token_s is not None:
        # Only a prefill worker says when the prompt is computed. A transfer comes before the first token.
        prefilled = max(routed, summary.first_token_s - summary.transfer_s)
    yield "prefill", routed, summary.finished_s if prefilled is None else prefilled, {}
    if prefilled is None:
        return
    moved = prefilled + summary.transfer_s
    if summary.usage.transferred_bytes or summary.transfer_s:
        yield "transfer", prefilled, moved, {"kvasir.bytes": summary.usage.transferred_bytes}
    yield "decode", moved, summary.finished_s, {"kvasir.output_tokens": summary.usage.output_tokens}


def otlp_recorder(
    endpoint: str | None, service: str, *, share: float = 1.0, most_per_s: int = MOST_PER_S
) -> SpanRecorder | None:
    """Return a recorder that exports to the collector at `endpoint`, or None without one; `share` and
    `most_per_s` are those of SpanRecorder."""
    if endpoint is None:
        return None
    # Imported here, see SpanRecorder.
    from kvasir.telemetry.otlp.exporter import otlp_processor

    return SpanRecorder(otlp_processor(endpoint), service, share=share, most_per_s=most_per_s)
