"""What a call is routed by, and what of its route it has left to try."""

from __future__ import annotations

from functools import partial

from kvasir.core.errors import KvasirError
from kvasir.core.requests import RouteArm
from kvasir.ports.router import RequestPort
from kvasir_platform.gateway.catalog.models import ModelTable, Served
from kvasir_platform.gateway.catalog.slo_classes import session_name
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.chat import ChatBody
from kvasir_platform.gateway.openai.schema.texts import CompletionBody
from kvasir_platform.gateway.traffic.choice import RoutedTo, RouteKey, RouteTable
from kvasir_platform.gateway.traffic.outcomes import is_fault

_CHARS_PER_ID = 4
"""What a token id counts as where characters are counted."""


class RequestRoute:
    """The models that may answer one call, in order. `arm` is the one whose turn it is."""

    def __init__(self, routed: RoutedTo, models: ModelTable, router: RequestPort) -> None:
        self.routed = routed
        self._models = models
        self._router = router
        self._chain = routed.chain
        self._at = 0
        self._skip_missing()

    @property
    def arm(self) -> RouteArm:
        """The route, and the name of the model or adapter whose turn it is."""
        return RouteArm(self.routed.route, self._chain[self._at])

    @property
    def served(self) -> Served:
        """The model whose turn it is."""
        return self._models.find(self._chain[self._at])

    @property
    def first(self) -> bool:
        """Whether nothing was tried or passed over before."""
        return self._at == 0

    def moves_on(self, error: KvasirError) -> bool:
        """Return whether another model takes over from the one that ended the call with `error`."""
        if not is_fault(error) or self._at + 1 >= len(self._chain):
            return False
        self._at += 1
        self._skip_missing()
        return True

    def _skip_missing(self) -> None:
        """Pass over models without workers, unless none is left that has some."""
        if self._at + 1 >= len(self._chain):
            return
        missing = self._router.not_ready_models()
        for at in range(self._at, len(self._chain)):
            if missing.get(self._models.find(self._chain[at]).model.name) is None:
                self._at = at
                return


def request_route(
    table: RouteTable,
    models: ModelTable,
    router: RequestPort,
    *,
    tenant: str,
    exchange: Exchange,
    body: ChatBody | CompletionBody,
) -> RequestRoute | None:
    """Return the route of a call, None if the client named a model. May raise RequestError for the
    session."""
    if body.model not in table:
        return None
    headers = exchange.request.headers
    session = session_name(headers, body.session)
    key = RouteKey(tenant, headers, session, exchange.request_id, partial(prompt_chars, body))
    return RequestRoute(table.choose(body.model, key), models, router)


def prompt_chars(body: ChatBody | CompletionBody) -> int:
    """Return the characters of the prompts of a body, before the chat template."""
    if isinstance(body, ChatBody):
        return sum(_chars(message.content) for message in body.messages)
    return _chars(body.prompt)


def _chars(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, int):
        return _CHARS_PER_ID
    if isinstance(content, list):
        return sum(map(_chars, content))
    return _chars(getattr(content, "text", None)) if content is not None else 0
