"""POST /v1/embeddings, /v1/rerank and /v1/score: each input is a request of its own in the router, so that a
call is distributed over the replicas of its pool."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvasir.core.errors import RequestError
from kvasir.core.requests import Request, Task
from kvasir_platform.gateway.catalog.capabilities import ModelCapabilities
from kvasir_platform.gateway.catalog.models import EdgeModel, Served
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.calls import truncated
from kvasir_platform.gateway.openai.embedding_answer import EmbeddingAnswer
from kvasir_platform.gateway.openai.schema.decode import decode_embedding
from kvasir_platform.gateway.openai.schema.scoring import ScoringFields
from kvasir_platform.gateway.openai.scoring import (
    ScoreAnswer,
    ScoringCall,
    decode_rerank,
    decode_score,
    rerank_call,
    score_call,
)
from kvasir_platform.gateway.openai.side_calls import EmbeddingCall, embedding_call
from kvasir_platform.gateway.prompt.control_tokens import ControlTokens
from kvasir_platform.gateway.serving.context import GatewayContext, brownout_line
from kvasir_platform.gateway.serving.embedding_run import EmbeddingRun, VectorAnswer
from kvasir_platform.gateway.serving.routed_call import RoutedApi, RoutedCall, RoutedRun
from kvasir_platform.gateway.tenants.caller import Caller, Charge

_Scored = TypeVar("_Scored", bound=ScoringFields)


class EmbeddingApi(RoutedApi):
    """The endpoints."""

    def embed(self, caller: Caller, exchange: Exchange) -> None:
        """POST /v1/embeddings."""
        body = decode_embedding(exchange.request.body)
        caller.check_model(self._context.models.first.name if body.model is None else body.model)
        served = self._context.models.find(body.model)
        model = served.model
        call = embedding_call(body, model.tokenizer.vocabulary, model.capabilities, model.control_in_prompts)
        check_dimensions(call.dimensions, served.model)
        answer = partial(EmbeddingAnswer, exchange, call)
        EmbedCall(
            self._context, self._active, caller, exchange, call=call, served=served, answer=answer
        ).start()

    def rerank(self, caller: Caller, exchange: Exchange) -> None:
        """POST /v1/rerank."""
        self._compare(caller, exchange, decode_rerank(exchange.request.body), rerank_call)

    def score(self, caller: Caller, exchange: Exchange) -> None:
        """POST /v1/score."""
        self._compare(caller, exchange, decode_score(exchange.request.body), score_call)

    def _compare(
        self,
        caller: Caller,
        exchange: Exchange,
        body: _Scored,
        call_of: Callable[[_Scored, ModelCapabilities, ControlTokens | None], ScoringCall],
    ) -> None:
        caller.check_model(body.model)
        served = self._context.models.find(body.model)
        call = call_of(body, served.model.capabilities, served.model.control_in_prompts)
        answer = partial(ScoreAnswer, exchange, call)
        EmbedCall(
            self._context, self._active, caller, exchange, call=call, served=served, answer=answer
        ).start()


class EmbedCall(RoutedCall):
    """A call for the vectors of its inputs. `answer` takes the number of inputs and Unix time."""

    __slots__ = ("_answer", "_call", "_inputs")

    def __init__(
        self,
        context: GatewayContext,
        active: set[RoutedRun],
        caller: Caller,
        exchange: Exchange,
        *,
        call: EmbeddingCall,
        served: Served,
        answer: Callable[[int, int], VectorAnswer],
    ) -> None:
        super().__init__(context, active, caller, exchange, served=served, salt="")
        self._call = call
        self._answer = answer
        self._inputs: list[array[int]] = []
        exchange.lines += brownout_line(context.router.brownout(served.model.name))

    def start(self) -> None:
        """Tokenize the inputs. May raise KvasirError."""
        self._tokenize(self._call.inputs, add_special_tokens=self._call.add_special_tokens)

    def submit(self, encoded: Sequence[array[int]]) -> None:
        """See ServedCall."""
        self._inputs = inputs = fitting_inputs(self._call, self._served.model, encoded)
        for number, tokens in enumerate(inputs):
            self.caller.check_size(len(tokens), 0, self._call.param(number))
        self.caller.admit(sum(map(len, inputs)), self)

    def run(self, charge: Charge) -> None:
        """See ServedCall."""
        context, exchange = self._context, self.exchange
        run = EmbeddingRun(
            self._answer(len(self._inputs), int(context.wall())),
            context,
            request=self._input,
            inputs=len(self._inputs),
            trace=self._trace,
            on_end=self._end,
        )
        self._begin(run, charge)
        exchange.on_gone = run.gone
        run.start()

    def _input(self, index: int) -> Request:
        return self._request(
            self._inputs[index],
            None if len(self._inputs) == 1 else index,
            priority=self.caller.priority(self._call.priority),
            task=Task.EMBED,
        )


def check_dimensions(dimensions: int | None, model: EdgeModel) -> None:
    """Raise RequestError if the vectors of `model` cannot be cut to `dimensions`."""
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
    """Return the tokens of each input; `encoded` holds those of the texts. Raise RequestError for an input
    that is empty or longer than the model's context."""
    texts, inputs = iter(encoded), []
    for index, each in enumerate(call.inputs):
        tokens = next(texts) if isinstance(each, str) else each
        tokens = truncated(tokens, call.truncation, model.context)
        where = call.param(index)
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
