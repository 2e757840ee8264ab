"""A scripted router for the gateway's tests and its benchmark.

It keeps the port's obligations (one end per request, nothing after a cancel), so that a gateway that works
with it works with the real one.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, FinishReason, PositionLogprobs, Request, ToolCallDelta, Usage
from kvasir.ports.clock import Clock
from kvasir.ports.recordings import RecordingBatch, RecordingQuery
from kvasir.ports.router import (
    NO_BROWNOUT,
    AdmissionView,
    BrownoutView,
    CellView,
    DecisionRecord,
    EndedRequests,
    PrefixView,
    RegretView,
    RequestSummary,
    RunningView,
    ServedAdapter,
    StreamSink,
    WorkerView,
)


def _unobserved(_summary: RequestSummary) -> None:
    """Does nothing."""


@dataclass
class ScriptedStream:
    """One request that the gateway submitted, with methods to answer it."""

    request: Request
    sink: StreamSink
    clock: Clock
    on_summary: Callable[[RequestSummary], None] = _unobserved
    live: bool = True
    sent: int = 0
    first_s: float | None = None
    offsets: dict[int, int] = field(default_factory=dict)

    def emit(
        self,
        text: str,
        *,
        index: int = 0,
        logprobs: tuple[PositionLogprobs, ...] = (),
        finish: FinishReason | None = None,
        stop_reason: str | None = None,
        reasoning: str = "",
        tool_calls: tuple[ToolCallDelta, ...] = (),
        reasoning_tokens: int = 0,
        prompt_logprobs: tuple[PositionLogprobs | None, ...] = (),
        usage: Usage | None = None,
    ) -> None:
        """Send one token of `text` to choice `index`; ignored after the end."""
        if not self.live:
            return
        if self.first_s is None:
            self.first_s = self.clock.now()
        offset = self.offsets.get(index, 0)
        self.offsets[index] = offset + 1
        self.sent += 1
        self.sink.on_delta(
            Delta(
                request_id=self.request.request_id,
                offset=offset,
                token_ids=(offset,),
                text=text,
                index=index,
                logprobs=logprobs,
                finish=finish,
                stop_reason=stop_reason,
                reasoning=reasoning,
                tool_calls=tool_calls,
                reasoning_tokens=reasoning_tokens,
                prompt_logprobs=prompt_logprobs,
                usage=usage,
            )
        )

    def embed(self, vector: Iterable[float], *, cached: int = 0) -> None:
        """Answer an embedding request with `vector` and end it successfully."""
        if self.live:
            self.first_s = self.clock.now()
            done = Delta(
                self.request.request_id,
                0,
                finish=FinishReason.STOP,
                last=True,
                embedding=array("f", vector),
            )
            self.sink.on_delta(done)
            self.finish(cached=cached)

    def finish(self, *, cached: int = 0, moved_bytes: int = 0, transfer_s: float = 0.0) -> None:
        """End the request successfully, after a transfer of `moved_bytes` that took `transfer_s` seconds."""
        if self.live:
            self.live = False
            summary = self.summary("ok", cached, moved_bytes, transfer_s)
            self.sink.on_finish(summary)
            self.on_summary(summary)

    def fail(self, error: KvasirError) -> None:
        """End the request with `error`."""
        if self.live:
            self.live = False
            summary = self.summary(error.code, 0)
            self.sink.on_error(error, summary)
            self.on_summary(summary)

    def view(self) -> RunningView:
        """The request as of now."""
        phase = "prefilling" if self.first_s is None else "decoding"
        return RunningView(phase, len(self.request.tokens), self.sent, self.summary("", 0))

    def summary(
        self, outcome: str, cached: int, moved_bytes: int = 0, transfer_s: float = 0.0
    ) -> RequestSummary:
        """The decision record of the request."""
        arrival = self.request.arrival_s
        return RequestSummary(
            request_id=self.request.request_id,
            model=self.request.model,
            outcome=outcome,
            arrival_s=arrival,
            finished_s=self.clock.now(),
            routed_s=arrival,
            prefill_done_s=self.first_s,
            first_token_s=self.first_s,
            transfer_s=transfer_s,
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            usage=Usage(
                prompt_tokens=len(self.request.tokens),
                cached_tokens=cached,
                transferred_bytes=moved_bytes,
                output_tokens=self.sent,
            ),
            trace_context=self.request.trace_context,
            slo=self.request.slo,
            tenant=self.request.tenant,
            route_arm=self.request.route_arm,
        )


class ScriptedAdapters:
    """AdapterPort for tests: `orders` are recorded, and `refusal` is raised instead if it is set."""

    def __init__(self) -> None:
        self.loaded: dict[str, ServedAdapter] = {}
        self.orders: list[tuple[str | None, ...]] = []
        self.refusal: KvasirError | None = None

    def served(self) -> dict[str, ServedAdapter]:
        """`loaded`."""
        return self.loaded

    async def load(self, model: str | None, name: str, source: str, replicas: int) -> tuple[str, ...]:
        """Record the order."""
        if self.refusal is not None:
            raise self.refusal
        self.orders.append(("load", model, name, source, str(replicas)))
        return "prefill-1", "decode-1"

    async def unload(self, name: str) -> tuple[str, ...]:
        """Record the order."""
        if self.refusal is not None:
            raise self.refusal
        self.orders.append(("unload", name))
        return ("prefill-1",)


class ScriptedRecordings:
    """RecordingPort for tests: `queries` are recorded, and answered with `batch`."""

    def __init__(self) -> None:
        self.queries: list[tuple[str, RecordingQuery]] = []
        self.batch = RecordingBatch("r/1", 0.0, (), 0, 0, 0, False, 64)

    def read(self, reader: str, query: RecordingQuery) -> RecordingBatch:
        """Record the query."""
        self.queries.append((reader, query))
        return self.batch


class ScriptedRouter:
    """RouterPort for tests. `script`, if set, answers each request in the next iteration of the loop;
    `on_summary` is called with the summary of each that has ended."""

    def __init__(self, clock: Clock, script: Callable[[ScriptedStream], None] | None = None) -> None:
        self._clock = clock
        self._submitted = asyncio.Event()
        self._cancelled = asyncio.Event()
        self.script = script
        self.on_summary: Callable[[RequestSummary], None] = _unobserved
        self.streams: list[ScriptedStream] = []
        self.cancelled: list[str] = []
        self.browned_out = NO_BROWNOUT
        self.views: list[WorkerView] = []
        self.records: dict[str, DecisionRecord] = {}
        self.regrets: dict[str, RegretView] = {}
        self.summaries: list[RequestSummary] = []
        self.admissions: dict[str, AdmissionView] = {}
        self.drains: list[tuple[str, bool, str]] = []
        self.cell_list: list[CellView] = []
        self.reason: str | None = None
        self.was_ready = False
        self.reasons: dict[str, str | None] = {}
        self.refusal: KvasirError | None = None
        self.refusals: dict[str, KvasirError] = {}
        self.adapters = ScriptedAdapters()
        self.recordings = ScriptedRecordings()

    def submit(self, request: Request, sink: StreamSink) -> None:
        """Record the request, or raise `refusal`, or that of `refusals` for its model, if one is set."""
        if self.refusal is not None:
            raise self.refusal
        if (refusal := self.refusals.get(request.model)) is not None:
            raise refusal
        stream = ScriptedStream(request, sink, self._clock, self.on_summary)
        self.streams.append(stream)
        self._submitted.set()
        if self.script is not None:
            asyncio.get_running_loop().call_soon(self.script, stream)

    def cancel(self, request_id: str) -> None:
        """Record the cancel; the sink receives nothing more."""
        self.cancelled.append(request_id)
        self._cancelled.set()
        for stream in self.streams:
            if stream.request.request_id == request_id:
                stream.live = False

    def workers(self) -> list[WorkerView]:
        """`views`."""
        return list(self.views)

    def explain(self, request_id: str) -> DecisionRecord | None:
        """What `records` has."""
        return self.records.get(request_id)

    def regret(self) -> dict[str, RegretView]:
        """`regrets`."""
        return self.regrets

    @property
    def in_flight(self) -> int:
        """The number of streams that have not ended."""
        return sum(stream.live for stream in self.streams)

    def running(self, most: int) -> list[RunningView]:
        """Those streams that have not ended."""
        live = [stream for stream in self.streams if stream.live]
        return [stream.view() for stream in live[:most]]

    def running_request(self, request_id: str) -> RunningView | None:
        """The stream of that id, if it has not ended."""
        found = (each for each in self.running(len(self.streams)) if each.so_far.request_id == request_id)
        return next(found, None)

    def ended(self) -> list[EndedRequests]:
        """`summaries`, of each model."""
        models = {summary.model for summary in self.summaries}
        return [
            EndedRequests.of(each for each in self.summaries if each.model == model)
            for model in sorted(models)
        ]

    async def prefixes(self, most: int) -> list[PrefixView]:
        """There is no index."""
        return []

    def drain(self, worker_id: str, draining: bool, reason: str = "") -> None:
        """Record the request to drain, or raise `refusal` if one is set."""
        if self.refusal is not None:
            raise self.refusal
        self.drains.append((worker_id, draining, reason))

    def brownout(self, model: str) -> BrownoutView:
        """See RouterPort: the value of `browned_out`."""
        return self.browned_out

    def admission(self) -> dict[str, AdmissionView]:
        """`admissions`."""
        return self.admissions

    def cells(self) -> list[CellView]:
        """`cell_list`."""
        return self.cell_list

    def not_ready_reason(self) -> str | None:
        """`reason`."""
        return self.reason

    def refusing_reason(self) -> str | None:
        """`reason`, unless it `was_ready`."""
        return None if self.was_ready else self.reason

    def not_ready_models(self) -> dict[str, str | None]:
        """`reasons`."""
        return dict(self.reasons)

    async def submitted(self, count: int = 1) -> ScriptedStream:
        """Wait until `count` requests have arrived; return the last of them."""
        while len(self.streams) < count:
            self._submitted.clear()
            await self._submitted.wait()
        return self.streams[count - 1]

    async def cancels(self, count: int = 1) -> list[str]:
        """Wait until `count` requests were cancelled."""
        while len(self.cancelled) < count:
            self._cancelled.clear()
            await self._cancelled.wait()
        return list(self.cancelled)
