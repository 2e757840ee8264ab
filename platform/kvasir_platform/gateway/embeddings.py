"""POST /v1/embeddings: each input is a request of its own in the router, so that a call is spread over the
replicas of its pool, and its answer is put together here.

A call may have thousands of inputs. Only some of them are in the router at a time, so that a large call takes
turns with the others, and each vector is encoded when it comes: encoding all of them at the end would hold up
every stream of this process.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvasir.core.errors import CapacityError, KvasirError, RequestError, UpstreamError
from kvasir.core.requests import Delta, Request, SloClass, Task, Usage
from kvasir.ports.router import RequestSummary
from kvasir.telemetry.reasons import CLIENT_CLOSED, OK
from kvasir.telemetry.spans import TraceContext
from kvasir_platform.gateway.answer import add_usage
from kvasir_platform.gateway.calls import truncated
from kvasir_platform.gateway.endpoint import Guard, Tools, raised
from kvasir_platform.gateway.errors import error_headers, error_status
from kvasir_platform.gateway.generation import server_timing
from kvasir_platform.gateway.http import Exchange
from kvasir_platform.gateway.models import EdgeModel, Served
from kvasir_platform.gateway.schema.decode import decode_embedding
from kvasir_platform.gateway.side_calls import EmbeddingCall, embedding_call
from kvasir_platform.gateway.tenants.caller import Caller, Charge
from kvasir_platform.gateway.tracing import trace_header, trace_of

_WINDOW = 256
"""Inputs of one call that are in the router at once: several batches of an engine."""
_SLICE = 32
"""Inputs that are submitted in one turn of the loop, which streams share: at most a few milliseconds."""
_TRACED = 32
"""Inputs of one call that have spans."""
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class _Wish:
    """How a call is to be served: for whom, by what, and how fast."""

    caller: Caller
    served: Served
    slo: SloClass
    salt: str
    trace: TraceContext


class EmbeddingApi:
    """The endpoint. `guard(exchange, step)` runs a step that may raise, and answers what it raises."""

    def __init__(self, tools: Tools, guard: Guard) -> None:
        self._tools = tools
        self._guard = guard
        self._active: set[_Run] = set()

    def in_flight(self) -> int:
        """Calls that the router has."""
        return len(self._active)

    def abandon_all(self, error: KvasirError) -> None:
        """End every call with `error`."""
        for run in list(self._active):
            run.abandon(error)

    def embed(self, caller: Caller, exchange: Exchange) -> None:
        """POST /v1/embeddings."""
        body = decode_embedding(exchange.request.body)
        caller.check_model(self._tools.models.first.name if body.model is None else body.model)
        served = self._tools.models.find(body.model)
        exchange.model = served.model.name
        model = served.model
        call = embedding_call(body, model.tokenizer.vocabulary, model.powers)
        check_dimensions(call.dimensions, model)
        headers = exchange.request.headers
        trace = trace_of(headers, self._tools.spans)
        exchange.lines += trace_header(trace)
        wish = _Wish(caller, served, caller.slo.asked_for(headers), caller.salt(""), trace)
        texts = [each for each in call.inputs if isinstance(each, str)]
        if not texts:
            self._submit(exchange, call, wish, [])
            return
        model.tokenizers.encode(
            texts,
            add_special_tokens=call.add_special_tokens,
            salt=wish.salt,
            then=lambda ids: self._guard(exchange, lambda: self._submit(exchange, call, wish, ids)),
            failed=lambda error: self._guard(exchange, lambda: raised(error)),
        )

    def _submit(
        self, exchange: Exchange, call: EmbeddingCall, wish: _Wish, encoded: list[array[int]]
    ) -> None:
        """Have the tenant charged for all inputs."""
        if self._left(exchange, wish):
            return
        inputs = fitting_inputs(call, wish.served.model, encoded)
        for number, tokens in enumerate(inputs):
            wish.caller.check_size(len(tokens), 0, "input" if len(inputs) == 1 else f"input[{number}]")
        wish.caller.admit(
            sum(map(len, inputs)),
            then=lambda charge: self._guard(
                exchange, lambda: self._run(exchange, call, wish, inputs, charge)
            ),
            failed=lambda error: self._guard(exchange, lambda: raised(error)),
        )

    def _run(
        self,
        exchange: Exchange,
        call: EmbeddingCall,
        wish: _Wish,
        inputs: list[array[int]],
        charge: Charge,
    ) -> None:
        if self._left(exchange, wish):
            charge.release()
            return
        tools, model = self._tools, wish.served.model
        name = f"{exchange.request_id}-{tools.suffix()}"
        deadline_s = exchange.arrival_s + tools.deployment.gateway.request_timeout_s
        priority = wish.caller.priority(call.priority)

        def request(index: int) -> Request:
            return Request(
                request_id=name if len(inputs) == 1 else f"{name}-{index}",
                model=model.name,
                tokens=inputs[index],
                adapter=wish.served.adapter,
                salt=wish.salt,
                arrival_s=exchange.arrival_s,
                deadline_s=deadline_s,
                priority=priority,
                trace_context=wish.trace.onward,
                slo=wish.slo,
                task=Task.EMBED,
                tenant=wish.caller.tenant,
            )

        def ended(run: _Run) -> None:
            self._active.discard(run)
            if run.worked:
                charge.settle(run.usage.prompt_tokens, 0)
            else:
                charge.release()

        exchange.lines += charge.header_lines
        answer = EmbeddingAnswer(exchange, call, len(inputs), int(tools.wall()))
        run = _Run(answer, tools, request=request, inputs=len(inputs), trace=wish.trace, on_end=ended)
        self._active.add(run)
        exchange.on_gone = run.gone
        run.start()

    def _left(self, exchange: Exchange, wish: _Wish) -> bool:
        """Whether nobody waits for the answer any more, which is counted."""
        if exchange.open:
            return False
        self._tools.metrics.request_refused(CLIENT_CLOSED, wish.served.model.name)
        return True


def check_dimensions(dimensions: int | None, model: EdgeModel) -> None:
    """Raise RequestError where the vectors of `model` cannot be cut to so many dimensions."""
    if dimensions is None:
        return
    if model.matryoshka is None:
        raise RequestError(
            f"The embeddings of {model.name!r} cannot be cut: the model was not trained for it.",
            code="unsupported_parameter",
            param="dimensions",
        )
    allowed = model.matryoshka.dimensions
    if allowed and dimensions not in allowed:
        raise RequestError(
            f"The embeddings of {model.name!r} can be cut to {', '.join(map(str, allowed))} dimensions, not "
            f"to {dimensions}.",
            code="invalid_value",
            param="dimensions",
        )


def fitting_inputs(call: EmbeddingCall, model: EdgeModel, encoded: Sequence[array[int]]) -> list[array[int]]:
    """The tokens of each input, `encoded` being those of the texts. Raises RequestError for one that is empty
    or longer than the model's context."""
    texts, inputs = iter(encoded), []
    for index, each in enumerate(call.inputs):
        tokens = next(texts) if isinstance(each, str) else each
        tokens = truncated(tokens, call.truncation, model.context)
        where = "input" if len(call.inputs) == 1 else f"input[{index}]"
        if not tokens:
            raise RequestError(f"{where} has no tokens.", code="invalid_value", param=where)
        if len(tokens) > model.context:
            raise RequestError(
                f"The model's context is {model.context} tokens, and {where} has {len(tokens)}. Shorten it, "
                "or set truncate_prompt_tokens.",
                code="context_length_exceeded",
                param=where,
            )
        inputs.append(tokens)
    return inputs


def cut(embedding: array[float], dimensions: int | None) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """A vector of float32, cut to `dimensions` and of length 1 again. Raises RequestError where it has not as
    many."""
    vector = np.frombuffer(embedding, dtype=np.float32)
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise RequestError(
            f"dimensions: the model's embeddings have {len(vector)}, and {dimensions} were asked for.",
            code="invalid_value",
            param="dimensions",
        )
    shorter = vector[:dimensions]
    norm = np.linalg.norm(shorter)
    return shorter / norm if norm > 0 else shorter


class EmbeddingAnswer:
    """One answer, sent when its last vector has come."""

    def __init__(self, exchange: Exchange, call: EmbeddingCall, inputs: int, created: int) -> None:
        self._exchange = exchange
        self._call = call
        self._created = created
        self._data: list[bytes] = [b""] * inputs

    def take(self, index: int, embedding: array[float]) -> None:
        """The vector of an input has come. Raises RequestError where it is shorter than was asked for."""
        vector = cut(embedding, self._call.dimensions)
        if self._call.base64:
            shown = b'"%b"' % base64.b64encode(vector.astype("<f4", copy=False).tobytes())
        else:
            shown = _encode(vector.tolist())
        self._data[index] = b'{"object":"embedding","index":%d,"embedding":%b}' % (index, shown)

    def finish(self, usage: Usage, timing: bytes) -> None:
        """Send the answer."""
        used = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        body = b'{"id":%b,"object":"list","created":%d,"model":%b,"data":[%b],"usage":%b}' % (
            _encode(f"embd-{self._exchange.request_id}"),
            self._created,
            _encode(self._call.model),
            b",".join(self._data),
            _encode(used),
        )
        self._exchange.respond(200, body, headers=timing)

    def fail(self, error: KvasirError) -> None:
        """Send the error instead."""
        self._exchange.fail(error_status(error), error, error_headers(error))


@dataclass(slots=True, eq=False)
class _Input:
    """The sink of one input."""

    run: _Run
    index: int
    request: Request
    live: bool = True

    def on_delta(self, delta: Delta) -> None:
        """The only one, with the vector."""
        self.run.took(self, delta)

    def on_finish(self, summary: RequestSummary) -> None:
        self.run.ended(self, summary, None)

    def on_error(self, error: KvasirError, summary: RequestSummary) -> None:
        self.run.ended(self, summary, error)


class _Run:
    """One call while it runs. Ends exactly once: finished, failed, or gone with its client; `on_end` hears of
    it when none of its inputs runs any more. The inputs are sinks of the router, which is called back only
    from a later turn of the loop."""

    def __init__(
        self,
        answer: EmbeddingAnswer,
        tools: Tools,
        *,
        request: Callable[[int], Request],
        inputs: int,
        trace: TraceContext,
        on_end: Callable[[_Run], None],
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
        self.usage = Usage()
        """What its inputs used: all that they did when `on_end` is called."""
        self.worked = False
        """Whether a worker may have had any of it."""
        self._summaries: list[RequestSummary] = []
        self._submitted_s = 0.0
        self._ended = False

    def start(self) -> None:
        """Submit the first inputs. Raises what the router raises, where it takes none of them."""
        self._submitted_s = self._tools.clock.now()
        try:
            self._refill()
        except KvasirError as error:
            self._cancel(error.code)
            self._end()
            raise

    def took(self, entry: _Input, delta: Delta) -> None:
        """A vector has come."""
        if self._ended:
            return
        try:
            if delta.embedding is None:
                raise UpstreamError("a worker ended an input without an embedding", code="protocol_error")
            self._answer.take(entry.index, delta.embedding)
        except KvasirError as error:
            self.abandon(error)

    def ended(self, entry: _Input, summary: RequestSummary, error: KvasirError | None) -> None:
        """An input is over, well or badly, and with the last one the call."""
        if summary.refused and isinstance(error, CapacityError) and len(self._live) > 1 and not self._ended:
            # As where the router refuses at once: fewer at a time, and this one again.
            if self._live.pop(entry.index, None) is not None:
                self._window = len(self._live)
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
            self._refill_soon()

    def abandon(self, error: KvasirError) -> None:
        """End the call with `error`, whatever still runs."""
        if not self._ended:
            self._end()
            self._answer.fail(error)
            asyncio.get_running_loop().call_soon(self._cancel, error.code)

    def gone(self, code: str) -> None:
        """The client left or was cut: free its inputs on every worker at once."""
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
        """Have as many inputs in the router as it takes, and no more than the window, by and by. Raises
        CapacityError where it takes none and none is there."""
        for _ in range(_SLICE):
            if not self._waiting or len(self._live) >= self._window or self._ended:
                return
            index = self._again.pop() if self._again else self._next
            entry = _Input(self, index, self._request(index))
            self._live[index] = entry
            try:
                self._tools.router.submit(entry.request, entry)
            except CapacityError:
                del self._live[index]
                if not self._live:
                    raise
                self._window = len(self._live)
                if index != self._next:
                    self._again.append(index)
                return
            except KvasirError:
                del self._live[index]
                raise
            self._next += index == self._next
        self._refill_soon()

    @property
    def _waiting(self) -> bool:
        """Whether there are inputs that have not come to the router."""
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
        self._tools.metrics.request_finished(summary)
        if len(self._summaries) < _TRACED:
            self._summaries.append(summary)
        if self._ended:
            self._settle()

    def _end(self) -> None:
        self._ended = True
        self._settle()

    def _settle(self) -> None:
        """Tell of the call when it has ended and nothing of it runs any more."""
        if self._live:
            return
        self._on_end(self)
        spans = self._tools.spans
        if spans is not None and self._summaries:
            now = self._tools.clock.now()
            spans.record(self._trace, self._summaries, now_s=now, admitted_s=self._submitted_s)
