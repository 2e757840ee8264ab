"""OpenTelemetry spans of a worker's legs, written when a leg has ended, under the span of its call.

The span `leg.prefill`, `leg.decode` or `leg.full` lasts from the leg's submission to its last delta. Its
child spans are the stages that the engine timed: `engine.queue`, `engine.tier`, `engine.pull`,
`engine.prefill` and `engine.decode`. The engine reports durations, not times, so the stages are placed one
after another from the submission on; the rest of the leg's span is preparation and delivery.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvasir.core.requests import DEFAULT_SLO, Delta, EngineRequest, FinishReason, SloClass, Timings, Usage
from kvasir.ports.clock import Rng
from kvasir.telemetry.spans import Attributes, recorded_parent

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_NS = 1_000_000_000
_Stage = tuple[str, float, Attributes]


class LegSpanRecorder:
    """Records ended legs of the worker `worker_id`, of the service `service`. `record` never blocks, because
    the processor exports in its own thread. Under tail sampling it records legs that fail, or take longer
    than their SLO class promises for their tokens; `slo` is that of legs whose router does not say it."""

    def __init__(
        self,
        processor: SpanProcessor,
        service: str,
        worker_id: str,
        wall_ns: Callable[[], int] = time.time_ns,
        *,
        rng: Rng | None = None,
        slo: SloClass = DEFAULT_SLO,
    ) -> None:
        # Imported here so that a worker without tracing never loads the SDK.
        from kvasir.telemetry.otlp.ended_spans import EndedSpans

        self._spans = EndedSpans(
            processor,
            {"service.name": service, "service.instance.id": worker_id},
            random.SystemRandom() if rng is None else rng,
        )
        self._wall_ns = wall_ns
        self._slo = slo

    def record(self, request: EngineRequest, last: Delta, *, elapsed_s: float) -> None:
        """Write the spans of a leg that ends with the delta `last`, `elapsed_s` seconds after its submission.
        A leg without a trace, or of one that is not sampled, has none."""
        slow_or_failed = last.finish is FinishReason.ERROR or elapsed_s > self._promised_s(request, last)
        parent = recorded_parent(request.trace_context, slow_or_failed=slow_or_failed)
        if not parent:
            return
        state = request.trace_context.partition(" ")[2]
        end = self._wall_ns()
        begin = end - int(elapsed_s * _NS)
        usage = last.usage or Usage()
        spans = self._spans
        above = spans.parent(parent, state)
        own = spans.child(above)
        at = begin
        for name, lasted_s, attributes in _stages(last.timings or Timings(), usage):
            until = min(end, at + int(lasted_s * _NS))
            spans.add(name, spans.child(own), own, (at, until), attributes)
            at = until
        error = last.error if last.finish is FinishReason.ERROR else None
        attributes_of_leg = _attributes(request, last, usage)
        spans.add(
            f"leg.{request.leg.value}", own, above, (begin, end), attributes_of_leg, serves=True, error=error
        )

    def _promised_s(self, request: EngineRequest, last: Delta) -> float:
        slo = request.slo or self._slo
        tokens = 0 if last.usage is None else last.usage.output_tokens
        return slo.ttft_s + slo.itl_s * tokens

    def close(self) -> None:
        """Export pending spans, within the timeout of the exporter."""
        self._spans.close()


def otlp_leg_recorder(
    endpoint: str | None, service: str, worker_id: str, slo: SloClass = DEFAULT_SLO
) -> LegSpanRecorder | None:
    """Return a recorder that exports to the collector at `endpoint`, or None without one."""
    if endpoint is None:
        return None
    # Imported here, see LegSpanRecorder.
    from kvasir.telemetry.otlp.exporter import otlp_processor

    return LegSpanRecorder(otlp_processor(endpoint), service, worker_id, slo=slo)


def _attributes(request: EngineRequest, last: Delta, usage: Usage) -> Attributes:
    return {
        "kvasir.outcome": last.error or ("" if last.finish is None else last.finish.value),
        "kvasir.prompt_tokens": usage.prompt_tokens,
        "kvasir.cached_tokens": usage.cached_tokens,
        "kvasir.output_tokens": usage.output_tokens,
    }


def _stages(timings: Timings, usage: Usage) -> Iterator[_Stage]:
    """Yield the stages that the leg had, in order: name, duration and attributes."""
    yield "engine.queue", timings.queue_s, {}
    if timings.tier_s:
        yield "engine.tier", timings.tier_s, {"kvasir.tier_tokens": usage.tier_tokens}
    if timings.transfer_s or usage.transferred_bytes:
        yield "engine.pull", timings.transfer_s, {"kvasir.bytes": usage.transferred_bytes}
    if timings.prefill_s:
        yield "engine.prefill", timings.prefill_s, {}
    if timings.decode_s:
        yield "engine.decode", timings.decode_s, {}
