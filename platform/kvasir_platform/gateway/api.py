"""The two generating endpoints: decode, tokenize, and hand over to the router."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvasir.config.spec import Deployment
from kvasir.core.errors import CapacityError, KvasirError, RequestError
from kvasir.core.requests import Request, SloClass
from kvasir.ports.clock import Clock
from kvasir.ports.router import RouterPort
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.reasons import CLIENT_CLOSED
from kvasir.telemetry.spans import SpanRecorder
from kvasir_platform.gateway.answer import Answer, AnswerHead
from kvasir_platform.gateway.calls import Call, chat_call, completion_call, fit_context
from kvasir_platform.gateway.decisions import RequestNames
from kvasir_platform.gateway.generation import Generation
from kvasir_platform.gateway.hints import SloClasses, session_name
from kvasir_platform.gateway.http import Exchange
from kvasir_platform.gateway.openai_schema import SamplingFields, decode_chat, decode_completion
from kvasir_platform.gateway.sse import ChatShape, CompletionShape, StreamedAnswer
from kvasir_platform.gateway.tokenization import TokenizerPool
from kvasir_platform.gateway.tracing import trace_parent
from kvasir_platform.gateway.whole import WholeAnswer


@dataclass(frozen=True, slots=True)
class Tools:
    """What the endpoints work with. `names` is told of each call that reaches the router; `wall` is the
    time of day in Unix seconds; `suffix` makes a few random characters."""

    deployment: Deployment
    router: RouterPort
    names: RequestNames
    tokenizers: TokenizerPool
    metrics: Metrics
    spans: SpanRecorder | None
    clock: Clock
    wall: Callable[[], float]
    suffix: Callable[[], str]


@dataclass(frozen=True, slots=True)
class _Wish:
    """How a call is to be served: by which LoRA adapter, how fast, and near what else."""

    adapter: str | None
    slo: SloClass
    session: str


class GenerateApi:
    """POST /v1/chat/completions and /v1/completions.

    `guard(exchange, step)` runs a step that may raise, and answers what it raises.
    """

    def __init__(self, tools: Tools, guard: Callable[[Exchange, Callable[[], None]], None]) -> None:
        self._tools = tools
        self._guard = guard
        self._context = tools.deployment.model.max_model_len
        self._served = tools.deployment.model.name
        self._adapters = frozenset(lora.name for lora in tools.deployment.lora)
        self._slo = SloClasses(tools.deployment.slo)
        self._active: set[Generation] = set()

    def in_flight(self) -> int:
        """Calls that the router has."""
        return len(self._active)

    def abandon_all(self, error: KvasirError) -> None:
        """End every call with `error`."""
        for generation in list(self._active):
            generation.abandon(error)

    def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        body = decode_chat(exchange.request.body)
        wish = self._wish(exchange, body)
        tokenizer = self._tools.tokenizers.tokenizer
        self._tokenize(exchange, chat_call(body, tokenizer.template, tokenizer.vocabulary), wish)

    def completion(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        body = decode_completion(exchange.request.body)
        wish = self._wish(exchange, body)
        vocabulary = self._tools.tokenizers.tokenizer.vocabulary
        self._tokenize(exchange, completion_call(body, vocabulary), wish)

    def _wish(self, exchange: Exchange, body: SamplingFields) -> _Wish:
        headers = exchange.request.headers
        return _Wish(
            self._adapter(body.model), self._slo.asked_for(headers), session_name(headers, body.user)
        )

    def _adapter(self, model: str) -> str | None:
        """The LoRA adapter behind a model's name, None for the base model."""
        if model == self._served:
            return None
        if model in self._adapters:
            return model
        raise RequestError(
            f"The model {model!r} does not exist here; GET /v1/models lists what does.",
            status=404,
            code="model_not_found",
            param="model",
        )

    def _tokenize(self, exchange: Exchange, call: Call, wish: _Wish) -> None:
        texts = [prompt for prompt in call.prompts if isinstance(prompt, str)]
        if not texts:
            self._submit(exchange, call, wish, [])
            return
        self._tools.tokenizers.encode(
            texts,
            add_special_tokens=call.add_special_tokens,
            then=lambda ids: self._guard(exchange, lambda: self._submit(exchange, call, wish, ids)),
            failed=lambda error: self._guard(exchange, lambda: _raise(error)),
        )

    def _submit(self, exchange: Exchange, call: Call, wish: _Wish, encoded: list[array[int]]) -> None:
        tools = self._tools
        if not exchange.open:
            tools.metrics.request_refused(CLIENT_CLOSED, self._served)
            return
        requests = self._requests(exchange, call, wish, encoded)
        tools.names.note(exchange.request_id, tuple(request.request_id for request in requests))
        answer = self._answer(exchange, call)
        generation = Generation(
            exchange,
            answer,
            router=tools.router,
            metrics=tools.metrics,
            spans=tools.spans,
            clock=tools.clock,
            on_end=self._active.discard,
        )
        self._active.add(generation)
        generation.start(requests)

    def _requests(
        self, exchange: Exchange, call: Call, wish: _Wish, encoded: list[array[int]]
    ) -> list[Request]:
        gateway = self._tools.deployment.gateway
        remaining = iter(encoded)
        param = "messages" if call.chat else "prompt"
        # Ids must be unique, and a client may send its own request id twice.
        name = f"{exchange.request_id}-{self._tools.suffix()}"
        made = []
        for i, prompt in enumerate(call.prompts):
            tokens = next(remaining) if isinstance(prompt, str) else prompt
            sampling = fit_context(
                call.sampling, len(tokens), self._context, gateway.default_max_tokens, param
            )
            if sampling.seed is not None and i:
                # Equal prompts in one call are meant to differ, as the choices of n are.
                sampling = replace(sampling, seed=(sampling.seed + i) % (1 << 63))
            made.append(
                Request(
                    request_id=name if len(call.prompts) == 1 else f"{name}-{i}",
                    model=self._served,
                    tokens=tokens,
                    sampling=sampling,
                    adapter=wish.adapter,
                    salt=call.salt,
                    arrival_s=exchange.arrival_s,
                    deadline_s=exchange.arrival_s + gateway.request_timeout_s,
                    trace_context=trace_parent(exchange.request.headers.get(b"traceparent")),
                    slo=wish.slo,
                    session=wish.session,
                )
            )
        return made

    def _answer(self, exchange: Exchange, call: Call) -> Answer:
        head = AnswerHead(
            id=f"{'chatcmpl' if call.chat else 'cmpl'}-{exchange.request_id}",
            created=int(self._tools.wall()),
            model=call.model,
            choices=len(call.prompts) * call.sampling.n,
            logprobs=call.answer_logprobs,
            include_usage=call.include_usage,
        )
        if not call.stream:
            return WholeAnswer(exchange, head, chat=call.chat)
        submitted = self._tools.clock.now()

        def timing() -> bytes:
            admit, first = submitted - exchange.arrival_s, self._tools.clock.now() - exchange.arrival_s
            return b"server-timing: admit;dur=%.2f, ttft;dur=%.2f\r\n" % (admit * 1e3, first * 1e3)

        return StreamedAnswer(exchange, head, ChatShape() if call.chat else CompletionShape(), timing)


def stopping() -> CapacityError:
    """What clients hear of calls that the end of the drain cuts."""
    return CapacityError("The server is stopping.", code="shutting_down")


def _raise(error: BaseException) -> None:
    raise error
