"""POST /v1/embeddings: each input is a request of its own in the router, so that a call is spread over the
replicas of its pool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.core.errors import KvasirError, RequestError
from kvasir.core.requests import Request, SloClass, Task
from kvasir.telemetry.reasons import CLIENT_CLOSED
from kvasir.telemetry.spans import TraceContext
from kvasir_platform.gateway.catalog.models import EdgeModel, Served
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.calls import truncated
from kvasir_platform.gateway.openai.embedding_answer import EmbeddingAnswer
from kvasir_platform.gateway.openai.schema.decode import decode_embedding
from kvasir_platform.gateway.openai.side_calls import EmbeddingCall, embedding_call
from kvasir_platform.gateway.serving.context import GatewayContext, Guard, brownout_line, raised
from kvasir_platform.gateway.serving.embedding_run import EmbeddingRun
from kvasir_platform.gateway.serving.tracing import trace_header, trace_of
from kvasir_platform.gateway.tenants.caller import Caller, Charge


@dataclass(frozen=True, slots=True)
class _EmbeddingOptions:
    """How a call is to be served: for whom, by what, and how fast."""

    caller: Caller
    served: Served
    slo: SloClass
    salt: str
    trace: TraceContext


class EmbeddingApi:
    """The endpoint. `guard(exchange, step)` runs a step that may raise, and answers what it raises."""

    def __init__(self, tools: GatewayContext, guard: Guard) -> None:
        self._tools = tools
        self._guard = guard
        self._active: set[EmbeddingRun] = set()

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
        call = embedding_call(body, model.tokenizer.vocabulary, model.capabilities)
        check_dimensions(call.dimensions, model)
        headers = exchange.request.headers
        trace = trace_of(headers, self._tools.spans)
        exchange.lines += trace_header(trace) + brownout_line(self._tools.router.brownout(model.name))
        options = _EmbeddingOptions(caller, served, caller.slo.asked_for(headers), caller.salt(""), trace)
        texts = [each for each in call.inputs if isinstance(each, str)]
        if not texts:
            self._submit(exchange, call, options, [])
            return
        model.tokenizers.encode(
            texts,
            add_special_tokens=call.add_special_tokens,
            salt=options.salt,
            then=lambda ids: self._guard(exchange, lambda: self._submit(exchange, call, options, ids)),
            failed=lambda error: self._guard(exchange, lambda: raised(error)),
        )

    def _submit(
        self, exchange: Exchange, call: EmbeddingCall, options: _EmbeddingOptions, encoded: list[array[int]]
    ) -> None:
        """Have the tenant charged for all inputs."""
        if self._left(exchange, options):
            return
        inputs = fitting_inputs(call, options.served.model, encoded)
        for number, tokens in enumerate(inputs):
            options.caller.check_size(len(tokens), 0, "input" if len(inputs) == 1 else f"input[{number}]")
        options.caller.admit(
            sum(map(len, inputs)),
            then=lambda charge: self._guard(
                exchange, lambda: self._run(exchange, call, options, inputs, charge)
            ),
            failed=lambda error: self._guard(exchange, lambda: raised(error)),
        )

    def _run(
        self,
        exchange: Exchange,
        call: EmbeddingCall,
        options: _EmbeddingOptions,
        inputs: list[array[int]],
        charge: Charge,
    ) -> None:
        if self._left(exchange, options):
            charge.release()
            return
        tools, model = self._tools, options.served.model
        name = f"{exchange.request_id}-{tools.suffix()}"
        deadline_s = exchange.arrival_s + tools.deployment.gateway.request_timeout_s
        priority = options.caller.priority(call.priority)

        def request(index: int) -> Request:
            return Request(
                request_id=name if len(inputs) == 1 else f"{name}-{index}",
                model=model.name,
                tokens=inputs[index],
                adapter=options.served.adapter,
                salt=options.salt,
                arrival_s=exchange.arrival_s,
                deadline_s=deadline_s,
                priority=priority,
                trace_context=options.trace.onward,
                slo=options.slo,
                task=Task.EMBED,
                tenant=options.caller.tenant,
            )

        def ended(run: EmbeddingRun) -> None:
            self._active.discard(run)
            if run.worked:
                charge.settle(run.usage.prompt_tokens, 0)
            else:
                charge.release()

        exchange.lines += charge.header_lines
        answer = EmbeddingAnswer(exchange, call, len(inputs), int(tools.wall()))
        run = EmbeddingRun(
            answer, tools, request=request, inputs=len(inputs), trace=options.trace, on_end=ended
        )
        self._active.add(run)
        exchange.on_gone = run.gone
        run.start()

    def _left(self, exchange: Exchange, options: _EmbeddingOptions) -> bool:
        """Whether nobody waits for the answer any more, which is counted."""
        if exchange.open:
            return False
        self._tools.metrics.request_refused(CLIENT_CLOSED, options.served.model.name)
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
