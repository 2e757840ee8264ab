"""The Responses API: its calls are chats on their way to the router, and what is stored can be read,
continued and cancelled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import unquote

import msgspec

from kvasir.config.spec.edge import ResponsesSpec
from kvasir.core.errors import CapacityError, RequestError
from kvasir.ports.responses import ResponseStore, StoredResponse
from kvasir.telemetry.reasons import CLIENT_CLOSED
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.chat import ChatBody
from kvasir_platform.gateway.openai.schema.limits import bad, unsupported
from kvasir_platform.gateway.responses.answers import BackgroundFormat, ResponsesFormat
from kvasir_platform.gateway.responses.background import BackgroundRun
from kvasir_platform.gateway.responses.body import InputItem, ResponsesBody
from kvasir_platform.gateway.responses.decode import decode_responses
from kvasir_platform.gateway.responses.errors import RESPONSES_ERRORS
from kvasir_platform.gateway.responses.references import next_reference, resolved, response_of
from kvasir_platform.gateway.responses.stored_items import (
    conversation_of,
    items_page,
    shown_response,
)
from kvasir_platform.gateway.responses.translation import MAX_INLINE_BYTES, translated
from kvasir_platform.gateway.serving.context import GatewayContext
from kvasir_platform.gateway.serving.generate_api import GenerateApi
from kvasir_platform.gateway.tenants.caller import Caller

RESPONSES = "/v1/responses"
CANCEL, INPUT_ITEMS = "/cancel", "/input_items"
_MAX_REFERRED = 32
"""Responses that are read for the items that one input refers to."""

_Found = Callable[[StoredResponse | None], None]


@dataclass(slots=True)
class _Read:
    """What a call has read of stored responses: items by their ids, and how much it was."""

    items: dict[str, InputItem] = field(default_factory=dict)
    responses: int = 0
    bytes: int = 0

    def conversation(self, stored: StoredResponse, param: str) -> list[InputItem]:
        """Return all items of a response, which is counted. Raise RequestError as conversation_of does."""
        self.responses += 1
        self.bytes += stored.size
        return conversation_of(stored, param)


class ResponsesApi:
    """POST /v1/responses, and the paths of one response."""

    def __init__(self, context: GatewayContext, generate: GenerateApi, store: ResponseStore) -> None:
        self._context = context
        self._generate = generate
        self._store = store
        self._spec: ResponsesSpec = context.deployment.gateway.responses
        self._running: Counter[str] = Counter()
        """Running background responses by tenant."""

    def create(self, caller: Caller, exchange: Exchange) -> None:
        """POST /v1/responses."""
        exchange.errors = RESPONSES_ERRORS
        asked = decode_responses(exchange.request.body)
        self._check(caller, asked)
        caller.check_model(asked.model)
        self._resolve(caller, exchange, asked, _Read())

    def _resolve(self, caller: Caller, exchange: Exchange, asked: ResponsesBody, read: _Read) -> None:
        """Go on when the items that the input refers to have been read."""
        wanted = next_reference(asked, read.items)
        if wanted is None:
            self._continue(caller, exchange, resolved(asked, read.items), read)
            return
        place, name = wanted
        param = f"input[{place}].id"
        response = response_of(name)
        missing = RequestError(
            f"Item with id {name[:64]!r} not found: {self._why_not_found()}",
            status=404,
            code="response_not_found",
            param=param,
        )
        if response is None:
            raise missing
        if read.responses == _MAX_REFERRED:
            raise bad(
                f"input refers to items of more than {_MAX_REFERRED} responses; send the items, or continue "
                "the last response with previous_response_id.",
                param,
            )

        def found(stored: StoredResponse | None) -> None:
            items = [] if stored is None else read.conversation(stored, param)
            read.items = {item.id or "": item for item in items} | read.items
            if name not in read.items:
                raise missing
            self._resolve(caller, exchange, asked, read)

        self._store.find(caller.tenant, response, self._answered(exchange, found))

    def _continue(self, caller: Caller, exchange: Exchange, asked: ResponsesBody, read: _Read) -> None:
        """Start a call after the response that it names, if any."""
        earlier = asked.previous_response_id
        if earlier is None:
            self._start(caller, exchange, asked, None, read.bytes)
            return

        def found(stored: StoredResponse | None) -> None:
            if stored is None:
                raise RequestError(
                    f"Previous response with id {earlier!r} not found: {self._why_not_found()}",
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
            self._start(caller, exchange, asked, stored, read.bytes + stored.size)

        self._store.find(caller.tenant, earlier, self._answered(exchange, found))

    def show(self, caller: Caller, exchange: Exchange) -> None:
        """GET and DELETE /v1/responses/{id}."""
        name = unquote(exchange.request.path[len(RESPONSES) + 1 :])
        if exchange.request.method == "DELETE":
            deleted = msgspec.json.encode({"id": name, "object": "response", "deleted": True})
            respond = self._responding(exchange, name, lambda _: deleted)
            self._store.remove(caller.tenant, name, respond)
            return
        if b"stream=true" in exchange.request.query.split(b"&"):
            raise unsupported(
                "stream", "A stored response is not streamed: poll it until its status is final."
            )
        self._store.find(caller.tenant, name, self._responding(exchange, name, shown_response))

    def cancel(self, caller: Caller, exchange: Exchange) -> None:
        """POST /v1/responses/{id}/cancel."""
        name = unquote(exchange.request.path[len(RESPONSES) + 1 : -len(CANCEL)])

        def shown(stored: StoredResponse) -> bytes:
            if not msgspec.json.decode(stored.body)["background"]:
                raise RequestError("Only a background response can be cancelled.", code="invalid_request")
            return shown_response(stored)

        self._store.cancel(caller.tenant, name, self._responding(exchange, name, shown))

    def input_items(self, caller: Caller, exchange: Exchange) -> None:
        """GET /v1/responses/{id}/input_items."""
        name = unquote(exchange.request.path[len(RESPONSES) + 1 : -len(INPUT_ITEMS)])
        query = exchange.request.query
        shown = self._responding(exchange, name, lambda stored: items_page(stored.items, query))
        self._store.find(caller.tenant, name, shown)

    def _check(self, caller: Caller, asked: ResponsesBody) -> None:
        """Raise KvasirError for what needs the store where there is none."""
        stores = bool(self._spec.max_responses)
        if asked.previous_response_id is not None and not stores:
            raise unsupported(
                "previous_response_id",
                "This server stores no responses (gateway.responses.max_responses: 0); send the whole "
                "conversation as input.",
            )
        if not asked.background:
            return
        if not (stores and self._spec.max_background):
            raise unsupported("background", "This server runs no background responses.")
        if asked.store is False:
            raise bad("background: true needs store: true.", "store")
        if asked.stream:
            raise unsupported("stream", "A background response is not streamed: poll it by its id.")

    def _start(
        self,
        caller: Caller,
        exchange: Exchange,
        asked: ResponsesBody,
        previous: StoredResponse | None,
        stored_bytes: int,
    ) -> None:
        """Translate a call that goes on from `previous`, in a thread if it is long, and begin it."""
        context = self._context
        suffix = context.suffix
        key = suffix() + suffix() + suffix() + suffix()
        translate = partial(
            translated,
            asked,
            previous,
            key=key,
            default_output=caller.default_output(context.deployment.gateway.default_max_tokens),
            stores=bool(self._spec.max_responses) and asked.store is not False,
        )
        begin = partial(self._begin, caller, exchange, asked, name=f"resp_{key}", stored_bytes=stored_bytes)
        if len(exchange.request.body) + stored_bytes <= MAX_INLINE_BYTES:
            begin(translate())
            return
        pool = context.models.find(asked.model).model.tokenizers
        pool.later(translate, begin, partial(context.errors.answer, exchange))

    def _begin(
        self,
        caller: Caller,
        exchange: Exchange,
        asked: ResponsesBody,
        made: tuple[ChatBody, bytes],
        *,
        name: str,
        stored_bytes: int,
    ) -> None:
        context = self._context
        chat, items = made
        if not exchange.open:
            context.errors.refused(CLIENT_CLOSED)
            return
        if not asked.background:

            def keep(body: bytes) -> None:
                self._store.put(StoredResponse(caller.tenant, name, body, items))

            answers = ResponsesFormat(asked, name, keep if items else None, context.wall)
            self._generate.start(caller, exchange, chat, answers, stored_bytes=stored_bytes)
            return
        if self._running[caller.tenant] >= self._spec.max_background:
            raise CapacityError(
                f"Your limit is {self._spec.max_background} background responses at the same time.",
                code="background_limit",
            )
        run = BackgroundRun(
            exchange, self._store, self._running, tenant=caller.tenant, name=name, items=items
        )
        background = BackgroundFormat(asked, name, run.ended, context.wall, run.begun)
        try:
            self._generate.start(caller, run.exchange, chat, background, stored_bytes=stored_bytes)
        except BaseException:
            run.exchange.close()
            raise

    def _responding(self, exchange: Exchange, name: str, shown: Callable[[StoredResponse], bytes]) -> _Found:
        """Return what answers with a response as `shown` makes of it."""

        def found(stored: StoredResponse | None) -> None:
            if stored is None:
                raise RequestError(
                    f"Response with id {name[:64]!r} not found: {self._why_not_found()}",
                    status=404,
                    code="response_not_found",
                )
            exchange.respond(200, shown(stored))

        return self._answered(exchange, found)

    def _answered(self, exchange: Exchange, found: _Found) -> _Found:
        """Return `found` for a client that still waits, and with its errors as answers: it may be called in a
        later turn of the loop."""

        def then(stored: StoredResponse | None) -> None:
            if not exchange.open:
                self._context.errors.refused(CLIENT_CLOSED)
                return
            try:
                found(stored)
            except Exception as error:  # noqa: BLE001 - called by the store: it is the call's answer
                self._context.errors.answer(exchange, error)

        return then

    def _why_not_found(self) -> str:
        if not self._spec.max_responses:
            return "this server stores no responses."
        return (
            f"the router that made a response keeps it in memory, for at most {self._spec.ttl_s:g} s and "
            "within its limits, unless store is false."
        )
