"""POST /v1/embeddings: each input is a request of its own in the router, so that a call is spread over the
replicas of its pool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvasir.core.errors import KvasirError, RequestError
from kvasir.core.requests import Request, SloClass, Task
from kvasir_platform.gateway.catalog.models import EdgeModel, Served
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.calls import truncated
from kvasir_platform.gateway.openai.embedding_answer import EmbeddingAnswer
from kvasir_platform.gateway.openai.schema.decode import decode_embedding
from kvasir_platform.gateway.openai.side_calls import EmbeddingCall, embedding_call
from kvasir_platform.gateway.serving.call_steps import ServedCall
from kvasir_platform.gateway.serving.context import GatewayContext, brownout_line
from kvasir_platform.gateway.serving.embedding_run import EmbeddingRun
from kvasir_platform.gateway.serving.tracing import trace_header, trace_of
from kvasir_platform.gateway.tenants.caller import Caller, Charge


class EmbeddingApi:
    """The endpoint."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
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
        caller.check_model(self._context.models.first.name if body.model is None else body.model)
        served = self._context.models.find(body.model)
        exchange.model = served.model.name
        call = embedding_call(body, served.model.tokenizer.vocabulary, served.model.capabilities)
        check_dimensions(call.dimensions, served.model)
        EmbedCall(self._context, self._active, caller, exchange, call=call, served=served).start()


class EmbedCall(ServedCall):
    """A call for embeddings of `served`. `active` has the runs that the router works on."""

    __slots__ = (
        "_active",
        "_call",
        "_charge",
        "_context",
        "_deadline_s",
        "_inputs",
        "_name",
        "_salt",
        "_served",
        "_slo",
        "_trace",
    )

    def __init__(
        self,
        context: GatewayContext,
        active: set[EmbeddingRun],
        caller: Caller,
        exchange: Exchange,
        *,
        call: EmbeddingCall,
        served: Served,
    ) -> None:
        super().__init__(caller, exchange, context.errors)
        headers = exchange.request.headers
        self.model = served.model.name
        self._context = context
        self._active = active
        self._call = call
        self._served = served
        self._trace = trace_of(headers, context.spans)
        exchange.lines += trace_header(self._trace) + brownout_line(context.router.brownout(self.model))
        self._slo: SloClass = caller.slo.asked_for(headers)
        self._salt = caller.salt("")
        self._inputs: list[array[int]] = []
        self._charge: Charge | None = None
        self._name = ""
        self._deadline_s = exchange.arrival_s + context.deployment.gateway.request_timeout_s

    def start(self) -> None:
        """Have the inputs tokenized. May raise KvasirError."""
        texts = [each for each in self._call.inputs if isinstance(each, str)]
        if not texts:
            self.encoded([])
            return
        self._served.model.tokenizers.encode(
            texts, self, add_special_tokens=self._call.add_special_tokens, salt=self._salt
        )

    def submit(self, encoded: Sequence[array[int]]) -> None:
        """See ServedCall."""
        self._inputs = inputs = fitting_inputs(self._call, self._served.model, encoded)
        for number, tokens in enumerate(inputs):
            self.caller.check_size(len(tokens), 0, "input" if len(inputs) == 1 else f"input[{number}]")
        self.caller.admit(sum(map(len, inputs)), self)

    def run(self, charge: Charge) -> None:
        """See ServedCall."""
        context, exchange = self._context, self.exchange
        self._charge = charge
        self._name = f"{exchange.request_id}-{context.suffix()}"
        answer = EmbeddingAnswer(exchange, self._call, len(self._inputs), int(context.wall()))
        run = EmbeddingRun(
            answer,
            context,
            request=self._request,
            inputs=len(self._inputs),
            trace=self._trace,
            on_end=self._ended,
        )
        self._active.add(run)
        exchange.on_gone = run.gone
        run.start()

    def _request(self, index: int) -> Request:
        return Request(
            request_id=self._name if len(self._inputs) == 1 else f"{self._name}-{index}",
            model=self._served.model.name,
            tokens=self._inputs[index],
            adapter=self._served.adapter,
            salt=self._salt,
            arrival_s=self.exchange.arrival_s,
            deadline_s=self._deadline_s,
            priority=self.caller.priority(self._call.priority),
            trace_context=self._trace.onward,
            slo=self._slo,
            task=Task.EMBED,
            tenant=self.caller.tenant,
        )

    def _ended(self, run: EmbeddingRun) -> None:
        """The router works on it no more."""
        self._active.discard(run)
        if self._charge is None:
            raise AssertionError("a call ran without a charge")
        if run.worked:
            self._charge.settle(run.usage.prompt_tokens, 0)
        else:
            self._charge.release()


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
