"""The two generating endpoints: decode, tokenize, and hand over to the router."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace

from kvasir.core.errors import CapacityError, KvasirError, RequestError
from kvasir.core.requests import Request, SloClass
from kvasir.core.values import value
from kvasir.ports.router import BrownoutView
from kvasir.telemetry.reasons import CLIENT_CLOSED
from kvasir.telemetry.spans import TraceContext
from kvasir_platform.gateway.catalog.models import EdgeModel, Served
from kvasir_platform.gateway.catalog.slo_classes import session_name
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.calls import Call, chat_call, completion_call, fit_context, truncated
from kvasir_platform.gateway.openai.schema.decode import decode_chat, decode_completion
from kvasir_platform.gateway.openai.schema.sampling import SamplingFields
from kvasir_platform.gateway.serving.answering import answer_of
from kvasir_platform.gateway.serving.context import GatewayContext, Guard, brownout_line, raised
from kvasir_platform.gateway.serving.generation import Generation
from kvasir_platform.gateway.serving.tracing import trace_header, trace_of
from kvasir_platform.gateway.tenants.caller import Caller, Charge


@value
class _CallOptions:
    """How a call is to be served: for whom, by what, how fast, and near what else. `otherwise` begins again
    with the model that the client named, where `served` is a fallback that may not be able to."""

    caller: Caller
    served: Served
    slo: SloClass
    session: str
    salt: str
    trace: TraceContext
    otherwise: Callable[[], None] | None = None


class GenerateApi:
    """POST /v1/chat/completions and /v1/completions.

    `guard(exchange, step)` runs a step that may raise, and answers what it raises.
    """

    def __init__(self, tools: GatewayContext, guard: Guard) -> None:
        self._tools = tools
        self._guard = guard
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
        body = decode_chat(exchange.request.body)

        def call(model: EdgeModel) -> Call:
            return chat_call(body, model.tokenizer.template, model.tokenizer.vocabulary, model.capabilities)

        self._begin(caller, exchange, body, call)

    def completion(self, caller: Caller, exchange: Exchange) -> None:
        """POST /v1/completions."""
        body = decode_completion(exchange.request.body)

        def call(model: EdgeModel) -> Call:
            return completion_call(body, model.tokenizer.vocabulary, model.capabilities)

        self._begin(caller, exchange, body, call)

    def _begin(
        self, caller: Caller, exchange: Exchange, body: SamplingFields, call: Callable[[EdgeModel], Call]
    ) -> None:
        """Find what is to serve a call, which is made for that model."""
        caller.check_model(body.model)
        asked = self._tools.models.find(body.model)
        exchange.model = asked.model.name
        options = self._options(caller, exchange, body, asked)
        brownout = self._tools.router.brownout(asked.model.name)
        exchange.lines += brownout_line(brownout)
        fallback = self._fallback(caller, brownout, asked)
        if fallback is not None:
            self._fall_back(exchange, call, options, fallback)
            return
        self._tokenize(exchange, call(asked.model), options)

    def _options(
        self, caller: Caller, exchange: Exchange, body: SamplingFields, served: Served
    ) -> _CallOptions:
        headers = exchange.request.headers
        trace = trace_of(headers, self._tools.spans)
        exchange.lines += trace_header(trace)
        return _CallOptions(
            caller,
            served,
            caller.slo.asked_for(headers),
            caller.session(session_name(headers, body.session)),
            caller.salt(body.cache_salt or ""),
            trace,
        )

    def _fallback(self, caller: Caller, brownout: BrownoutView, asked: Served) -> Served | None:
        """The model that is to answer in place of `asked`. An adapter has no stand-in."""
        name = brownout.fallback_model
        if name is None or asked.adapter is not None or not caller.may_use(name):
            return None
        return self._tools.models.find(name)

    def _fall_back(
        self, exchange: Exchange, call: Callable[[EdgeModel], Call], options: _CallOptions, fallback: Served
    ) -> None:
        """Have `fallback` answer, under its own name, or the model that the client named where the fallback
        cannot: its context or its powers may be less."""

        def otherwise() -> None:
            self._tokenize(exchange, call(options.served.model), options)

        try:
            made = replace(call(fallback.model), model=fallback.model.name)
        except RequestError:
            otherwise()
            return
        self._tokenize(exchange, made, replace(options, served=fallback, otherwise=otherwise))

    def _tokenize(self, exchange: Exchange, call: Call, options: _CallOptions) -> None:
        texts = [prompt for prompt in call.prompts if isinstance(prompt, str)]
        if not texts:
            self._submit(exchange, call, options, [])
            return
        options.served.model.tokenizers.encode(
            texts,
            add_special_tokens=call.add_special_tokens,
            salt=options.salt,
            then=lambda ids: self._guard(exchange, lambda: self._submit(exchange, call, options, ids)),
            failed=lambda error: self._guard(exchange, lambda: raised(error)),
        )

    def _submit(
        self, exchange: Exchange, call: Call, options: _CallOptions, encoded: list[array[int]]
    ) -> None:
        """Have the tenant charged for all that the call may use."""
        if self._left(exchange, options):
            return
        try:
            requests = self._requests(exchange, call, options, encoded)
        except RequestError:
            if options.otherwise is None:
                raise
            options.otherwise()
            return
        options.caller.admit(
            sum(len(each.tokens) + each.sampling.n * (each.sampling.max_tokens or 0) for each in requests),
            then=lambda charge: self._guard(
                exchange, lambda: self._run(exchange, call, options, requests, charge)
            ),
            failed=lambda error: self._guard(exchange, lambda: raised(error)),
        )

    def _run(
        self, exchange: Exchange, call: Call, options: _CallOptions, requests: list[Request], charge: Charge
    ) -> None:
        if self._left(exchange, options):
            charge.release()
            return
        exchange.lines += charge.header_lines
        try:
            self._generate(exchange, call, options, requests, charge)
        # What is charged and never released takes one of the tenant's places for good.
        except BaseException:
            charge.release()
            raise

    def _generate(
        self, exchange: Exchange, call: Call, options: _CallOptions, requests: list[Request], charge: Charge
    ) -> None:
        tools = self._tools
        tools.names.note(exchange.request_id, tuple(request.request_id for request in requests))
        answer = answer_of(
            exchange,
            call,
            [request.tokens for request in requests],
            options.served.model.tokenizer,
            created=int(tools.wall()),
            now=tools.clock.now,
        )
        filtered = tools.filters.around(
            answer, call, choices=len(requests) * call.sampling.n, tenant=options.caller.tenant
        )

        def ended(generation: Generation) -> None:
            self._active.discard(generation)
            options.caller.turned_away(generation.error)
            if generation.worked:
                charge.settle(generation.usage.prompt_tokens, generation.usage.output_tokens)
            else:
                charge.release()

        generation = Generation(
            exchange,
            answer if filtered is None else filtered,
            router=tools.router,
            metrics=tools.metrics,
            spans=tools.spans,
            clock=tools.clock,
            on_end=ended,
            trace=options.trace,
        )
        self._active.add(generation)
        if filtered is None:
            generation.start(requests)
        else:
            filtered.bind(generation.end_choice, generation.broken)
            generation.start(requests)
            filtered.follow(exchange)

    def _left(self, exchange: Exchange, options: _CallOptions) -> bool:
        """Whether nobody waits for the answer any more, which is counted."""
        if exchange.open:
            return False
        self._tools.metrics.request_refused(CLIENT_CLOSED, options.served.model.name)
        return True

    def _requests(
        self,
        exchange: Exchange,
        call: Call,
        options: _CallOptions,
        encoded: list[array[int]],
    ) -> list[Request]:
        """One for each prompt. Raises RequestError for what does not fit the model or the tenant's limits."""
        gateway = self._tools.deployment.gateway
        served, caller = options.served.model, options.caller
        context = caller.context(served.context)
        default_output = caller.default_output(gateway.default_max_tokens)
        priority = caller.priority(call.priority)
        remaining = iter(encoded)
        param = "messages" if call.chat else "prompt"
        # Ids must be unique, and a client may send its own request id twice.
        name = f"{exchange.request_id}-{self._tools.suffix()}"
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
                    adapter=options.served.adapter,
                    salt=options.salt,
                    arrival_s=exchange.arrival_s,
                    deadline_s=exchange.arrival_s + gateway.request_timeout_s,
                    trace_context=options.trace.onward,
                    slo=options.slo,
                    session=options.session,
                    parsing=call.parsing,
                    priority=priority,
                    tenant=caller.tenant,
                )
            )
        return made


def stopping() -> CapacityError:
    """What clients hear of calls that the end of the drain cuts."""
    return CapacityError("The server is stopping.", code="shutting_down")
