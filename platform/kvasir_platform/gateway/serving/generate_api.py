"""The two generation endpoints of OpenAI's API, and how every call that generates text comes from its body to
the router."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvasir.core.errors import CapacityError, KvasirError, RequestError
from kvasir.core.requests import Request, RouteArm
from kvasir_platform.gateway.catalog.models import EdgeModel, Served
from kvasir_platform.gateway.catalog.slo_classes import session_name
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.answer import Answer
from kvasir_platform.gateway.openai.answer_formats import CHAT, COMPLETION, AnswerFormat
from kvasir_platform.gateway.openai.calls import (
    Call,
    chat_call,
    completion_call,
    fit_context,
    truncated,
    with_room,
)
from kvasir_platform.gateway.openai.schema.chat import ChatBody
from kvasir_platform.gateway.openai.schema.decode import decode_chat, decode_completion
from kvasir_platform.gateway.openai.schema.media_parts import HeldMedia, with_media
from kvasir_platform.gateway.openai.schema.texts import CompletionBody, TokenizeBody
from kvasir_platform.gateway.prompt.control_tokens import ControlTokens
from kvasir_platform.gateway.serving.answering import answer_of
from kvasir_platform.gateway.serving.context import GatewayContext, brownout_line
from kvasir_platform.gateway.serving.generation import Generation
from kvasir_platform.gateway.serving.routed_call import RoutedApi, RoutedCall, RoutedRun
from kvasir_platform.gateway.tenants.caller import Caller, Charge
from kvasir_platform.gateway.tenants.wanted_place import wanted_place
from kvasir_platform.gateway.traffic.request_route import RequestRoute, request_route
from kvasir_platform.gateway.traffic.shadows import ShadowCopy

_MAX_INLINE_MESSAGES = 512
_MAX_INLINE_BYTES = 64 << 10
"""Conversations with more messages, or more bytes beside their texts, are rendered in a thread: every
message, call and tool takes some microseconds."""
_MAX_INLINE_TEXT = 256 << 10
"""So are larger bodies: a text is only copied, but several times."""


class GenerateApi(RoutedApi):
    """POST /v1/chat/completions and /v1/completions."""

    def __init__(self, context: GatewayContext) -> None:
        super().__init__(context)
        self._held = HeldMedia(context.deployment.gateway.image_inputs.max_held_bytes)

    def chat(self, caller: Caller, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        self.start(caller, exchange, decode_chat(exchange.request.body), CHAT)

    def completion(self, caller: Caller, exchange: Exchange) -> None:
        """POST /v1/completions."""
        self.start(caller, exchange, decode_completion(exchange.request.body), COMPLETION)

    def start(
        self,
        caller: Caller,
        exchange: Exchange,
        body: ChatBody | CompletionBody,
        answers: AnswerFormat,
        *,
        stored_bytes: int = 0,
    ) -> None:
        """Start a call, also one whose body another API's endpoint has translated, and answer it in the form
        `answers`. `stored_bytes` is the size of what does not come from the exchange's body. May raise
        KvasirError."""
        caller.check_model(body.model)
        context = self._context
        route = None
        if context.traffic is not None:
            route = request_route(
                context.traffic.routes,
                context.models,
                context.router,
                tenant=caller.tenant,
                exchange=exchange,
                body=body,
            )
        GenerateCall(
            self._context,
            self._active,
            caller,
            exchange,
            body=body,
            answers=answers,
            asked=context.models.find(body.model) if route is None else route.served,
            stored_bytes=stored_bytes,
            held=self._held,
            route=route,
        ).start()


class GenerateCall(RoutedCall):
    """A call that generates text. `asked` is the model that the client named, or that its `route` chose;
    under a brown-out, a fallback may serve it. `stored_bytes` is as for GenerateApi.start."""

    __slots__ = (
        "_answers",
        "_asked",
        "_body",
        "_call",
        "_held",
        "_lines",
        "_requests",
        "_route",
        "_session",
        "_stored_bytes",
    )

    def __init__(
        self,
        context: GatewayContext,
        active: set[RoutedRun],
        caller: Caller,
        exchange: Exchange,
        *,
        body: ChatBody | CompletionBody,
        answers: AnswerFormat,
        asked: Served,
        stored_bytes: int,
        held: HeldMedia,
        route: RequestRoute | None = None,
    ) -> None:
        super().__init__(context, active, caller, exchange, served=asked, salt=body.cache_salt or "")
        self._body = body
        self._answers = answers
        self._asked = asked
        self._session = caller.session(session_name(exchange.request.headers, body.session))
        self._place = wanted_place(exchange.request.headers, caller)
        self._requests: list[Request] = []
        self._stored_bytes = stored_bytes
        self._held = held
        self._route = route
        if route is not None:
            self._lines = exchange.lines
            self._slo = route.routed.slo or self._slo
            self._place = self._place.or_policy(route.routed.policy)

    def start(self) -> None:
        """Fetch the media that are URLs, and render. May raise KvasirError."""
        fetches, body = self._context.media_fetches, self._body
        media = self._asked.model.capabilities.media
        if (
            fetches is not None
            and media is not None
            and isinstance(body, ChatBody)
            and fetches.wanted(body, media.kinds)
        ):
            fetches.begin(body, self.caller, self._held, self._fetched, self.failed)
        else:
            self._render()

    def _fetched(self, body: ChatBody, size: int) -> None:
        self._body = body
        self._stored_bytes += size
        if not self._client_left():
            self._render()

    def _render(self) -> None:
        """Choose the model, render the prompts, of a long conversation in a thread, and tokenize them. May
        raise KvasirError."""
        prefixes = self._prefixes
        if prefixes is not None and prefixes.awaits_texts and isinstance(self._body, ChatBody):
            first = self._body.messages[0]
            if first.role in ("system", "developer") and isinstance(first.content, str):
                prefixes.see(self.caller.tenant, first.content)
        brownout = self._context.router.brownout(self._asked.model.name)
        self.exchange.lines += brownout_line(brownout)
        render = partial(self._rendered, self._fallback(brownout.fallback_model))
        model, data = self._asked.model, self.exchange.request.body
        if renders_in_thread(self._body, model.control_in_chats, data, self._stored_bytes):
            model.tokenizers.later(render, self._rendered_later, self.failed)
        else:
            self._answer_with(*render())

    def submit(self, encoded: Sequence[array[int]]) -> None:
        """See ServedCall. If the prompts do not fit the fallback, the requested model serves them."""
        try:
            self._requests = self._router_requests(encoded)
        except RequestError:
            if self._served is self._asked:
                raise
            self._answer_with(self._asked, self._call_for(self._asked.model))
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
            self._answers,
            self._requests,
            self._served.model.tokenizer,
            created=int(context.wall()),
            now=context.clock.now,
        )
        filtered = context.filters.around(
            answer, call, choices=len(self._requests) * call.sampling.n, tenant=self.caller.tenant
        )
        copy = None if self._route is None else self._shadowed(self._route)
        shown: Answer = answer if filtered is None else filtered
        generation = Generation(
            exchange,
            shown if copy is None else copy.tapped(shown),
            router=context.router,
            metrics=context.metrics,
            spans=context.spans,
            clock=context.clock,
            on_end=self._ended if copy is None else partial(self._ended, copy=copy),
            replaced=None if self._route is None else self._replaced,
            trace=self._trace,
        )
        self._held.hold(call.media_bytes)
        self._begin(generation, charge)
        if filtered is not None:
            filtered.bind(generation.end_choice, generation.broken)
        try:
            generation.start(self._requests)
        except KvasirError as error:
            if copy is not None:
                copy.withdraw()
            if not self._replaced(error):
                raise
            return
        if filtered is not None:
            filtered.follow(exchange)
        if copy is not None:
            copy.begin()

    def _replaced(self, error: KvasirError) -> bool:
        """Return whether the next model of the route answers, in a later turn of the loop."""
        route = self._route
        if route is None or not self.exchange.open or self.exchange.streaming:
            return False
        given_up = route.arm
        if not route.moves_on(error):
            return False
        self._context.metrics.route_fell_back(given_up)
        asyncio.get_running_loop().call_soon(self._start_again, route)
        return True

    def _start_again(self, route: RequestRoute) -> None:
        try:
            if not self._client_left():
                self._asked = route.served
                self.exchange.model = self._asked.model.name
                self.exchange.lines = self._lines
                self._name = f"{self.exchange.request_id}-{self._context.suffix()}"
                self.start()
        except Exception as error:  # noqa: BLE001 - called from the loop: it is the call's answer
            self.failed(error)

    def _shadowed(self, route: RequestRoute) -> ShadowCopy | None:
        """Return a copy of the call for the shadow of its route, None for none: media are not copied."""
        traffic = self._context.traffic
        if traffic is None or route.routed.shadow is None or not route.first or self._call.media:
            return None
        return traffic.shadows.copy_of(
            route.routed,
            self._requests,
            body_bytes=len(self.exchange.request.body),
            served=self._served.model,
            salt=self._salt,
            call_for=self._call_for,
        )

    def _ended(self, generation: Generation, copy: ShadowCopy | None = None) -> None:
        self._held.drop(self._call.media_bytes)
        self.caller.turned_away(generation.error)
        self._end(generation)
        if copy is not None:
            # The answer is finished after this, in the same turn of the loop.
            asyncio.get_running_loop().call_soon(copy.call_ended)

    def _fallback(self, name: str | None) -> Served | None:
        """Return the model that serves in place of the requested one, or None. An adapter has no fallback."""
        if name is None or self._asked.adapter is not None or not self.caller.may_use(name):
            return None
        return self._context.models.find(name)

    def _call_for(self, model: EdgeModel) -> Call:
        """Return the call that the body makes to `model`. Raise RequestError for a feature that the model
        lacks."""
        tokenizer, body = model.tokenizer, self._body
        if isinstance(body, ChatBody):
            return chat_call(
                body,
                tokenizer.template,
                tokenizer.vocabulary,
                model.capabilities,
                model.defaults,
                control=model.control_in_chats,
            )
        return completion_call(
            body, tokenizer.vocabulary, model.capabilities, model.defaults, model.control_in_prompts
        )

    def _rendered(self, fallback: Served | None) -> tuple[Served, Call]:
        """Return the model that answers, and the call to it. May raise KvasirError. Changes nothing, so that
        any thread may run it."""
        if fallback is not None:
            # Its context or its capabilities may be less than those of the model that was asked for.
            with contextlib.suppress(RequestError):
                return fallback, replace(self._call_for(fallback.model), model=fallback.model.name)
        return self._asked, self._call_for(self._asked.model)

    def _rendered_later(self, rendered: tuple[Served, Call]) -> None:
        if not self._client_left():
            self._answer_with(*rendered)

    def _answer_with(self, served: Served, call: Call) -> None:
        if self._route is not None:
            arm = self._route.arm
            if served is self._asked:
                call = replace(call, model=arm.arm)
            self._route_arm = arm if served is self._asked else RouteArm(arm.route, served.model.name)
        self._served, self._call = served, call
        self._tokenize(call.prompts, add_special_tokens=call.add_special_tokens)

    def _router_requests(self, encoded: Sequence[array[int]]) -> list[Request]:
        """Return one request per prompt. Raise RequestError for a prompt that exceeds the model's or the
        tenant's limits."""
        call, caller = self._call, self.caller
        context = caller.context(self._served.model.context)
        default_output = caller.default_output(self._context.deployment.gateway.default_max_tokens)
        priority = caller.priority(call.priority)
        remaining = iter(encoded)
        param = self._answers.prompt_param
        made = []
        for i, prompt in enumerate(call.prompts):
            tokens = next(remaining) if isinstance(prompt, str) else prompt
            media = call.media
            if media and (inputs := self._served.model.capabilities.media) is not None:
                tokens, media = with_media(tokens, media, inputs)
            tokens = truncated(tokens, call.truncation, context, max(1, call.sampling.max_tokens or 1))
            wanted = call.sampling
            if self._answers.fits_output:
                wanted = with_room(wanted, context - len(tokens))
            caller.check_size(len(tokens), wanted.max_tokens, param)
            sampling = fit_context(wanted, len(tokens), context, default_output, param)
            if sampling.seed is not None and i:
                # Equal prompts in one call are meant to differ, as the choices of n are.
                sampling = replace(sampling, seed=(sampling.seed + i * sampling.n) % (1 << 63))
            made.append(
                self._request(
                    tokens,
                    None if len(call.prompts) == 1 else i,
                    priority=priority,
                    sampling=sampling,
                    session=self._session,
                    parsing=call.parsing,
                    media=media,
                )
            )
        return made


def renders_in_thread(
    body: ChatBody | CompletionBody | TokenizeBody,
    control: ControlTokens | None,
    data: bytes,
    stored_bytes: int = 0,
) -> bool:
    """Return whether a body is rendered in a thread rather than on the event loop. `control` has the control
    tokens that are ordinary text in chats, `data` is the body as sent, and `stored_bytes` is as for
    GenerateApi.start."""
    messages = None if isinstance(body, CompletionBody) else body.messages
    if messages is None:
        return False
    size = len(data) + stored_bytes
    if len(messages) > _MAX_INLINE_MESSAGES or size > _MAX_INLINE_TEXT:
        return True
    if control is not None and control.takes_long(data, size):
        return True
    if size <= _MAX_INLINE_BYTES:
        return False
    texts = sum(len(each.content) for each in messages if isinstance(each.content, str))
    return size - texts > _MAX_INLINE_BYTES


def stopping() -> CapacityError:
    """Return the error of calls that exceed the drain timeout."""
    return CapacityError("The server is stopping.", code="shutting_down")
