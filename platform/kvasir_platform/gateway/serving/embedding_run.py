"""A running embeddings call. It may have thousands of inputs, of which only a window is in the router at a
time, so that a large call does not block others."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvasir.core.errors import CapacityError, KvasirError, UpstreamError
from kvasir.core.requests import Delta, Request, Usage
from kvasir.ports.router import RequestSummary
from kvasir.telemetry.reasons import OK
from kvasir.telemetry.spans import TraceContext
from kvasir_platform.gateway.openai.answer import add_usage
from kvasir_platform.gateway.serving.context import GatewayContext
from kvasir_platform.gateway.serving.generation import server_timing

_WINDOW = 256
"""Inputs of one call that are in the router at once: several batches of an engine."""
_SLICE = 32
"""Inputs that are submitted in one turn of the loop, which streams share: at most a few milliseconds."""
_TRACED = 32
"""Inputs of one call that have spans."""


@dataclass(slots=True, eq=False)
class _Input:
    """The sink of one input."""

    run: EmbeddingRun
    index: int
    request: Request
    live: bool = True

    def on_delta(self, delta: Delta) -> None:
        """The only one, with the vector."""
        self.run.took(self, delta)

    def lane(self, request_id: str) -> None:
        """None: there is one delta."""

    def on_finish(self, summary: RequestSummary) -> None:
        self.run.ended(self, summary, None)

    def on_error(self, error: KvasirError, summary: RequestSummary) -> None:
        self.run.ended(self, summary, error)


class VectorAnswer(Protocol):
    """What becomes of the vectors of a call."""

    def take(self, index: int, embedding: array[float]) -> None:
        """Add the vector of an input. May raise RequestError."""
        ...

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Send the response. `timing` is a header line."""
        ...

    def fail(self, error: KvasirError) -> None:
        """Send the error instead."""
        ...


class EmbeddingRun:
    """A running call. It ends exactly once: finished, failed, or abandoned by its client; `on_end` is called
    when none of its inputs runs any more. The inputs are sinks of the router, which is called only from a
    later iteration of the event loop."""

    def __init__(
        self,
        answer: VectorAnswer,
        tools: GatewayContext,
        *,
        request: Callable[[int], Request],
        inputs: int,
        trace: TraceContext,
        on_end: Callable[[EmbeddingRun], None],
    ) -> None:
        self._answer = answer
        self._tools = tools
        self._request = request
        self._inputs = inputs
        self._trace = trace
        self._on_end = on_end
        self._live: dict[int, _Input] = {}
        self._next = 0
        self._again: list[int] = []
        self._window = _WINDOW
        self._refill_due = False
        self._pause: asyncio.TimerHandle | None = None
        self.usage = Usage()
        """What its inputs used: all that they did when `on_end` is called."""
        self.worked = False
        """Whether a worker may have had any of it."""
        self._summaries: list[RequestSummary] = []
        self._submitted_s = 0.0
        self._ended = self._missed = False

    def start(self) -> None:
        """Submit the first inputs. Raise the error of the router if it accepts none of them."""
        self._submitted_s = self._tools.clock.now()
        try:
            self._refill()
        except KvasirError as error:
            self._cancel(error.code)
            self._end()
            raise

    def took(self, entry: _Input, delta: Delta) -> None:
        """Handle a vector."""
        if self._ended:
            return
        try:
            if delta.embedding is None:
                raise UpstreamError("a worker ended an input without an embedding", code="protocol_error")
            self._answer.take(entry.index, delta.embedding)
        except KvasirError as error:
            self.abandon(error)

    def ended(self, entry: _Input, summary: RequestSummary, error: KvasirError | None) -> None:
        """Handle the end of an input, with or without an error; the last one ends the call."""
        if (
            isinstance(error, CapacityError)
            and summary.refused
            and entry.index in self._live
            and self._goes_on(entry.request, len(self._live) - 1, error)
        ):
            # As where the router refuses at once.
            del self._live[entry.index]
            self._again.append(entry.index)
            return
        self._count(entry, summary)
        if self._ended:
            return
        if error is not None:
            self.abandon(error)
        elif not self._live and not self._waiting:
            self._end()
            self._answer.finish(self.usage, server_timing(summary, self._submitted_s))
        else:
            self._window = min(_WINDOW, self._window + 1)
            self._refill_soon()

    def abandon(self, error: KvasirError) -> None:
        """End the call with `error`, including running inputs."""
        if not self._ended:
            self._end()
            self._answer.fail(error)
            asyncio.get_running_loop().call_soon(self._cancel, error.code)

    def gone(self, code: str) -> None:
        """Cancel the inputs on every worker: the client has disconnected."""
        if not self._ended:
            self._cancel(code)
            self._end()

    def _refill_soon(self) -> None:
        if self._waiting and not self._refill_due:
            self._refill_due = True
            asyncio.get_running_loop().call_soon(self._refill_later)

    def _refill_later(self) -> None:
        self._refill_due = False
        if self._ended:
            return
        try:
            self._refill()
        except KvasirError as error:
            self.abandon(error)

    def _refill(self) -> None:
        """Submit inputs until the window is full or the router refuses. Raise CapacityError if it refuses and
        no input is running."""
        for _ in range(_SLICE):
            if not self._waiting or len(self._live) >= self._window or self._ended:
                return
            index = self._again.pop() if self._again else self._next
            entry = _Input(self, index, self._request(index))
            self._live[index] = entry
            try:
                self._tools.router.submit(entry.request, entry)
            except CapacityError as error:
                del self._live[index]
                if not self._goes_on(entry.request, len(self._live), error):
                    raise
                if index != self._next:
                    self._again.append(index)
                return
            except KvasirError:
                del self._live[index]
                raise
            self._next += index == self._next
        self._refill_soon()

    def _goes_on(self, refused: Request, live: int, error: CapacityError) -> bool:
        """Return whether to continue after the router refused an input while `live` others run: with a
        smaller window, or, if none runs but vectors have arrived, after a delay within the call's
        deadline."""
        if self._ended:
            return False
        if not live:
            again_s = self._tools.clock.now() + error.retry_after_s
            late = refused.deadline_s is not None and again_s >= refused.deadline_s
            if late or not self.usage.prompt_tokens:
                return False
            self._stop_pausing()
            later = asyncio.get_running_loop().call_later
            self._pause = later(error.retry_after_s, self._refill_later)
        self._window = max(1, live)
        return True

    @property
    def _waiting(self) -> bool:
        """Whether some inputs are not yet submitted."""
        return bool(self._again) or self._next < self._inputs

    def _cancel(self, code: str) -> None:
        for entry in list(self._live.values()):
            self.worked = True
            self._tools.router.cancel(entry.request.request_id)
            self._count(entry, self._cut_off(entry.request, code))

    def _cut_off(self, request: Request, code: str) -> RequestSummary:
        return RequestSummary(
            request_id=request.request_id,
            model=request.model,
            outcome=code,
            arrival_s=request.arrival_s,
            finished_s=self._tools.clock.now(),
            usage=Usage(prompt_tokens=len(request.tokens)),
            trace_context=request.trace_context,
            slo=request.slo,
        )

    def _count(self, entry: _Input, summary: RequestSummary) -> None:
        if self._live.pop(entry.index, None) is None:
            return
        self.worked = self.worked or summary.outcome == OK or summary.routed_s is not None
        self.usage = add_usage(self.usage, summary.usage)
        self._missed = self._tools.metrics.request_finished(summary) is False or self._missed
        if len(self._summaries) < _TRACED:
            self._summaries.append(summary)
        if self._ended:
            self._settle()

    def _end(self) -> None:
        self._ended = True
        self._stop_pausing()
        self._settle()

    def _stop_pausing(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def _settle(self) -> None:
        """Report the end of the call once none of its inputs runs."""
        if self._live:
            return
        self._on_end(self)
        spans = self._tools.spans
        if spans is not None and self._summaries:
            now = self._tools.clock.now()
            spans.record(
                self._trace,
                self._summaries,
                now_s=now,
                admitted_s=self._submitted_s,
                missed=self._missed,
            )
