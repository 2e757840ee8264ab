"""The two generating endpoints: decode, tokenize, and hand over to the router."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

from kvasir.core.errors import CapacityError, KvasirError
from kvasir.core.requests import Request, SloClass
from kvasir.telemetry.reasons import CLIENT_CLOSED
from kvasir.telemetry.spans import TraceContext
from kvasir_platform.gateway.answering import answer_of
from kvasir_platform.gateway.calls import Call, chat_call, completion_call, fit_context, truncated
from kvasir_platform.gateway.endpoint import Guard, Tools, raised
from kvasir_platform.gateway.generation import Generation
from kvasir_platform.gateway.hints import SloClasses, body_session, session_name
from kvasir_platform.gateway.http import Exchange
from kvasir_platform.gateway.models import Served
from kvasir_platform.gateway.schema.decode import decode_chat, decode_completion
from kvasir_platform.gateway.schema.sampling import SamplingFields
from kvasir_platform.gateway.tracing import trace_header, trace_of


@dataclass(frozen=True, slots=True)
class _Wish:
    """How a call is to be served: by what, how fast, and near what else."""

    served: Served
    slo: SloClass
    session: str


class GenerateApi:
    """POST /v1/chat/completions and /v1/completions.

    `guard(exchange, step)` runs a step that may raise, and answers what it raises.
    """

    def __init__(self, tools: Tools, guard: Guard) -> None:
        self._tools = tools
        self._guard = guard
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
        model = wish.served.model
        tokenizer = model.tokenizer
        call = chat_call(body, tokenizer.template, tokenizer.vocabulary, model.powers)
        self._tokenize(exchange, call, wish)

    def completion(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        body = decode_completion(exchange.request.body)
        wish = self._wish(exchange, body)
        model = wish.served.model
        self._tokenize(exchange, completion_call(body, model.tokenizer.vocabulary, model.powers), wish)

    def _wish(self, exchange: Exchange, body: SamplingFields) -> _Wish:
        headers = exchange.request.headers
        return _Wish(
            self._tools.models.find(body.model),
            self._slo.asked_for(headers),
            session_name(headers, body_session(body)),
        )

    def _tokenize(self, exchange: Exchange, call: Call, wish: _Wish) -> None:
        texts = [prompt for prompt in call.prompts if isinstance(prompt, str)]
        if not texts:
            self._submit(exchange, call, wish, [])
            return
        wish.served.model.tokenizers.encode(
            texts,
            add_special_tokens=call.add_special_tokens,
            salt=call.salt,
            then=lambda ids: self._guard(exchange, lambda: self._submit(exchange, call, wish, ids)),
            failed=lambda error: self._guard(exchange, lambda: raised(error)),
        )

    def _submit(self, exchange: Exchange, call: Call, wish: _Wish, encoded: list[array[int]]) -> None:
        tools = self._tools
        if not exchange.open:
            tools.metrics.request_refused(CLIENT_CLOSED, wish.served.model.name)
            return
        trace = trace_of(exchange.request.headers, tools.spans)
        exchange.lines += trace_header(trace)
        requests = self._requests(exchange, call, wish, encoded, trace)
        tools.names.note(exchange.request_id, tuple(request.request_id for request in requests))
        answer = answer_of(
            exchange,
            call,
            [request.tokens for request in requests],
            wish.served.model.tokenizer,
            created=int(tools.wall()),
            now=tools.clock.now,
        )
        generation = Generation(
            exchange,
            answer,
            router=tools.router,
            metrics=tools.metrics,
            spans=tools.spans,
            clock=tools.clock,
            on_end=self._active.discard,
            trace=trace,
        )
        self._active.add(generation)
        generation.start(requests)

    def _requests(
        self,
        exchange: Exchange,
        call: Call,
        wish: _Wish,
        encoded: list[array[int]],
        trace: TraceContext,
    ) -> list[Request]:
        gateway = self._tools.deployment.gateway
        served, adapter = wish.served.model, wish.served.adapter
        context = served.context
        remaining = iter(encoded)
        param = "messages" if call.chat else "prompt"
        # Ids must be unique, and a client may send its own request id twice.
        name = f"{exchange.request_id}-{self._tools.suffix()}"
        made = []
        for i, prompt in enumerate(call.prompts):
            tokens = next(remaining) if isinstance(prompt, str) else prompt
            tokens = truncated(tokens, call.truncation, context, max(1, call.sampling.max_tokens or 1))
            sampling = fit_context(call.sampling, len(tokens), context, gateway.default_max_tokens, param)
            if sampling.seed is not None and i:
                # Equal prompts in one call are meant to differ, as the choices of n are.
                sampling = replace(sampling, seed=(sampling.seed + i) % (1 << 63))
            made.append(
                Request(
                    request_id=name if len(call.prompts) == 1 else f"{name}-{i}",
                    model=served.name,
                    tokens=tokens,
                    sampling=sampling,
                    adapter=adapter,
                    salt=call.salt,
                    arrival_s=exchange.arrival_s,
                    deadline_s=exchange.arrival_s + gateway.request_timeout_s,
                    trace_context=trace.onward,
                    slo=wish.slo,
                    session=wish.session,
                    parsing=call.parsing,
                    priority=call.priority,
                )
            )
        return made


def stopping() -> CapacityError:
    """What clients hear of calls that the end of the drain cuts."""
    return CapacityError("The server is stopping.", code="shutting_down")
