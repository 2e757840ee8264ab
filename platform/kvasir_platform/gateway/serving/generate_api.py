"""The two generating endpoints, and a call to one of them from its body to the router."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from kvasir.core.errors import CapacityError, KvasirError, RequestError
from kvasir.core.requests import Request, SloClass
from kvasir_platform.gateway.catalog.models import EdgeModel, Served
from kvasir_platform.gateway.catalog.slo_classes import session_name
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.calls import Call, chat_call, completion_call, fit_context, truncated
from kvasir_platform.gateway.openai.schema.chat import ChatBody
from kvasir_platform.gateway.openai.schema.decode import decode_chat, decode_completion
from kvasir_platform.gateway.openai.schema.texts import CompletionBody
from kvasir_platform.gateway.serving.answering import answer_of
from kvasir_platform.gateway.serving.call_steps import ServedCall
from kvasir_platform.gateway.serving.context import GatewayContext, brownout_line
from kvasir_platform.gateway.serving.generation import Generation
from kvasir_platform.gateway.serving.tracing import trace_header, trace_of
from kvasir_platform.gateway.tenants.caller import Caller, Charge


class GenerateApi:
    """POST /v1/chat/completions and /v1/completions."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._active: set[Generation] = set()

    def in_flight(self) -> int:
        """Calls that the router has."""
        return len(self._active)

    def abandon_all(self, error: KvasirError) -> None:
        """End every call with `error`."""
        for generation in list(self._active):
            generation.abandon(error)

    def chat(self, caller: Caller, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        self._start(caller, exchange, decode_chat(exchange.request.body))

    def completion(self, caller: Caller, exchange: Exchange) -> None:
        """POST /v1/completions."""
        self._start(caller, exchange, decode_completion(exchange.request.body))

    def _start(self, caller: Caller, exchange: Exchange, body: ChatBody | CompletionBody) -> None:
        caller.check_model(body.model)
        asked = self._context.models.find(body.model)
        GenerateCall(self._context, self._active, caller, exchange, body=body, asked=asked).start()


class GenerateCall(ServedCall):
    """A call for chat or completions. `asked` is the model that the client named and `served` the one that
    answers: under a brown-out, a fallback. `active` has the generations that the router works on."""

    __slots__ = (
        "_active",
        "_asked",
        "_body",
        "_call",
        "_charge",
        "_context",
        "_requests",
        "_salt",
        "_served",
        "_session",
        "_slo",
        "_trace",
    )

    def __init__(
        self,
        context: GatewayContext,
        active: set[Generation],
        caller: Caller,
        exchange: Exchange,
        *,
        body: ChatBody | CompletionBody,
        asked: Served,
    ) -> None:
        super().__init__(caller, exchange, context.errors)
        exchange.model = asked.model.name
        headers = exchange.request.headers
        self._context = context
        self._active = active
        self._body = body
        self._asked = self._served = asked
        self._trace = trace_of(headers, context.spans)
        exchange.lines += trace_header(self._trace)
        self._slo: SloClass = caller.slo.asked_for(headers)
        self._session = caller.session(session_name(headers, body.session))
        self._salt = caller.salt(body.cache_salt or "")
        self._requests: list[Request] = []
        self._charge: Charge | None = None

    def start(self) -> None:
        """Choose the model that answers, and have the prompts tokenized. May raise KvasirError."""
        brownout = self._context.router.brownout(self._asked.model.name)
        self.exchange.lines += brownout_line(brownout)
        fallback = self._fallback(brownout.fallback_model)
        if fallback is not None:
            try:
                call = replace(self._call_for(fallback.model), model=fallback.model.name)
            except RequestError:
                # Its context or its capabilities may be less than those of the model that was asked for.
                fallback = None
            else:
                self._tokenize(fallback, call)
        if fallback is None:
            self._tokenize(self._asked, self._call_for(self._asked.model))

    def submit(self, encoded: Sequence[array[int]]) -> None:
        """See ServedCall. A fallback that the prompts do not fit gives way to the model that was asked
        for."""
        try:
            self._requests = self._router_requests(encoded)
        except RequestError:
            if self._served is self._asked:
                raise
            self._tokenize(self._asked, self._call_for(self._asked.model))
            return
        tokens = sum(
            len(each.tokens) + each.sampling.n * (each.sampling.max_tokens or 0) for each in self._requests
        )
        self.caller.admit(tokens, self)

    def run(self, charge: Charge) -> None:
        """See ServedCall."""
        context, call, exchange = self._context, self._call, self.exchange
        context.names.note(exchange.request_id, tuple(request.request_id for request in self._requests))
        answer = answer_of(
            exchange,
            call,
            [request.tokens for request in self._requests],
            self._served.model.tokenizer,
            created=int(context.wall()),
            now=context.clock.now,
        )
        filtered = context.filters.around(
            answer, call, choices=len(self._requests) * call.sampling.n, tenant=self.caller.tenant
        )
        self._charge = charge
        generation = Generation(
            exchange,
            answer if filtered is None else filtered,
            router=context.router,
            metrics=context.metrics,
            spans=context.spans,
            clock=context.clock,
            on_end=self._ended,
            trace=self._trace,
        )
        self._active.add(generation)
        if filtered is None:
            generation.start(self._requests)
        else:
            filtered.bind(generation.end_choice, generation.broken)
            generation.start(self._requests)
            filtered.follow(exchange)

    def _ended(self, generation: Generation) -> None:
        """The router works on it no more."""
        self._active.discard(generation)
        self.caller.turned_away(generation.error)
        if self._charge is None:
            raise AssertionError("a call ran without a charge")
        if generation.worked:
            self._charge.settle(generation.usage.prompt_tokens, generation.usage.output_tokens)
        else:
            self._charge.release()

    def _fallback(self, name: str | None) -> Served | None:
        """The model that is to answer in place of the one that was asked for. An adapter has none."""
        if name is None or self._asked.adapter is not None or not self.caller.may_use(name):
            return None
        return self._context.models.find(name)

    def _call_for(self, model: EdgeModel) -> Call:
        """What the body asks of that model. Raises RequestError for what the model cannot do."""
        tokenizer, body = model.tokenizer, self._body
        if isinstance(body, ChatBody):
            return chat_call(body, tokenizer.template, tokenizer.vocabulary, model.capabilities)
        return completion_call(body, tokenizer.vocabulary, model.capabilities)

    def _tokenize(self, served: Served, call: Call) -> None:
        self._served, self._call = served, call
        self.model = served.model.name
        texts = [prompt for prompt in call.prompts if isinstance(prompt, str)]
        if not texts:
            self.encoded([])
            return
        served.model.tokenizers.encode(
            texts, self, add_special_tokens=call.add_special_tokens, salt=self._salt
        )

    def _router_requests(self, encoded: Sequence[array[int]]) -> list[Request]:
        """One for each prompt. Raises RequestError for what does not fit the model or the tenant's limits."""
        gateway, call, exchange = self._context.deployment.gateway, self._call, self.exchange
        served, caller = self._served.model, self.caller
        context = caller.context(served.context)
        default_output = caller.default_output(gateway.default_max_tokens)
        priority = caller.priority(call.priority)
        remaining = iter(encoded)
        param = "messages" if call.chat else "prompt"
        # Ids must be unique, and a client may send its own request id twice.
        name = f"{exchange.request_id}-{self._context.suffix()}"
        made = []
        for i, prompt in enumerate(call.prompts):
            tokens = next(remaining) if isinstance(prompt, str) else prompt
            tokens = truncated(tokens, call.truncation, context, max(1, call.sampling.max_tokens or 1))
            caller.check_size(len(tokens), call.sampling.max_tokens, param)
            sampling = fit_context(call.sampling, len(tokens), context, default_output, param)
            if sampling.seed is not None and i:
                # Equal prompts in one call are meant to differ, as the choices of n are.
                sampling = replace(sampling, seed=(sampling.seed + i * sampling.n) % (1 << 63))
            made.append(
                Request(
                    request_id=name if len(call.prompts) == 1 else f"{name}-{i}",
                    model=served.name,
                    tokens=tokens,
                    sampling=sampling,
                    adapter=self._served.adapter,
                    salt=self._salt,
                    arrival_s=exchange.arrival_s,
                    deadline_s=exchange.arrival_s + gateway.request_timeout_s,
                    trace_context=self._trace.onward,
                    slo=self._slo,
                    session=self._session,
                    parsing=call.parsing,
                    priority=priority,
                    tenant=caller.tenant,
                )
            )
        return made


def stopping() -> CapacityError:
    """What clients hear of calls that the end of the drain cuts."""
    return CapacityError("The server is stopping.", code="shutting_down")
