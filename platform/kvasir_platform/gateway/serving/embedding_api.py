"""POST /v1/embeddings, /v1/classify, /v1/rerank and /v1/score: each input is a request of its own in the
router, so that a call is distributed over the replicas of its pool."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvasir.core.errors import RequestError
from kvasir.core.requests import Request, Task
from kvasir_platform.gateway.catalog.models import EdgeModel, Served
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.calls import check_kept, truncated
from kvasir_platform.gateway.openai.class_answer import ClassAnswer
from kvasir_platform.gateway.openai.embedding_answer import EmbeddingAnswer
from kvasir_platform.gateway.openai.schema.decode import decode_embedding
from kvasir_platform.gateway.openai.schema.scoring import ScoringFields
from kvasir_platform.gateway.openai.scoring import (
    CosineAnswer,
    PairAnswer,
    ScoringCall,
    decode_classify,
    decode_rerank,
    decode_score,
    rerank_call,
    score_call,
)
from kvasir_platform.gateway.openai.side_calls import EmbeddingCall, classify_call, embedding_call
from kvasir_platform.gateway.prompt.pairs import PairForm, kept_of_pair
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
        self._start(caller, exchange, call, served, partial(EmbeddingAnswer, exchange, call))

    def classify(self, caller: Caller, exchange: Exchange) -> None:
        """POST /v1/classify."""
        body = decode_classify(exchange.request.body)
        caller.check_model(body.model)
        served = self._context.models.find(body.model)
        model = served.model
        call = classify_call(body, model.tokenizer.vocabulary, model.capabilities, model.control_in_prompts)
        labels = () if model.classifier is None else model.classifier.classes.labels
        self._start(caller, exchange, call, served, partial(ClassAnswer, exchange, call, labels))

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
        call_of: Callable[[_Scored, EdgeModel], ScoringCall],
    ) -> None:
        caller.check_model(body.model)
        served = self._context.models.find(body.model)
        call = call_of(body, served.model)
        classifier = served.model.classifier
        answer = partial(CosineAnswer if classifier is None else PairAnswer, exchange, call)
        if classifier is None or classifier.pairs is None:
            self._start(caller, exchange, call, served, answer)
        else:
            PairedCall(
                self._context,
                self._active,
                caller,
                exchange,
                call=call,
                served=served,
                answer=answer,
                form=classifier.pairs,
            ).start()

    def _start(
        self,
        caller: Caller,
        exchange: Exchange,
        call: EmbeddingCall,
        served: Served,
        answer: Callable[[int, int], VectorAnswer],
    ) -> None:
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
        self._admit(fitting_inputs(self._call, self._served.model, encoded), self._call.param)

    def _admit(self, inputs: list[array[int]], param: Callable[[int], str]) -> None:
        """Charge the inputs, each from the field `param`, before they run."""
        self._inputs = inputs
        for number, tokens in enumerate(inputs):
            self.caller.check_size(len(tokens), 0, param(number))
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
            second_text_at=self._second_text_at(index),
        )

    def _second_text_at(self, index: int) -> int | None:
        """Return where token types change in an input."""
        return None


class PairedCall(EmbedCall):
    """A call for the scores of pairs of texts, of which a cross-encoder takes each as one input."""

    __slots__ = ("_changes", "_form", "_scoring")

    def __init__(
        self,
        context: GatewayContext,
        active: set[RoutedRun],
        caller: Caller,
        exchange: Exchange,
        *,
        call: ScoringCall,
        served: Served,
        answer: Callable[[int, int], VectorAnswer],
        form: PairForm,
    ) -> None:
        super().__init__(context, active, caller, exchange, call=call, served=served, answer=answer)
        self._scoring = call
        self._form = form
        self._changes: list[int | None] = []

    def submit(self, encoded: Sequence[array[int]]) -> None:
        """See ServedCall."""
        call = self._scoring
        first, second = encoded[: call.queries], encoded[call.queries :]
        inputs = []
        for number, tokens in enumerate(second):
            ids, change = fitting_pair(
                (first[number if len(first) > 1 else 0], tokens),
                self._form,
                call,
                call.param(call.queries + number),
                self._served.model.context,
            )
            inputs.append(ids)
            self._changes.append(change)
        self._admit(inputs, lambda number: call.param(call.queries + number))

    def _second_text_at(self, index: int) -> int | None:
        return self._changes[index]


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


def fitting_pair(
    texts: tuple[array[int], array[int]], form: PairForm, call: ScoringCall, param: str, context: int
) -> tuple[array[int], int | None]:
    """Return the tokens of a pair, truncated as requested, and where their types change. Raise RequestError
    for a pair that is longer than the model's context."""
    first, second = texts
    limit = call.truncation
    if limit is not None:
        room = check_kept(limit, context) - form.added
        if room < 2:
            raise RequestError(
                f"truncate_prompt_tokens {limit.tokens} leaves no room for two texts.",
                code="invalid_value",
                param="truncate_prompt_tokens",
            )
        kept = kept_of_pair(len(first), len(second), room)
        first, second = first[: kept[0]], second[: kept[1]]
    ids, change = form.joined(first, second)
    if len(ids) > context:
        raise too_long(len(ids), context, param)
    return ids, change


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
            raise too_long(len(tokens), model.context, where)
        inputs.append(tokens)
    return inputs


def too_long(tokens: int, context: int, where: str) -> RequestError:
    """Return the error for an input of more tokens than the model's context."""
    return RequestError(
        f"The model's context is {context} tokens, and {where} has {tokens}. Shorten it, or set "
        "truncate_prompt_tokens.",
        code="context_length_exceeded",
        param=where,
    )
