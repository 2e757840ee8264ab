"""Which endpoint a path has, by which methods, and whom each lets in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from kvasir.config.spec.tenants import Scope
from kvasir_platform.gateway.anthropic.endpoints import COUNT_TOKENS, MESSAGES, Admission, either_key
from kvasir_platform.gateway.console.cost_views import CostViews
from kvasir_platform.gateway.console.live_pages import LivePages
from kvasir_platform.gateway.console.shared_page import KEPT_S, SURVEYED_S, SharedPage
from kvasir_platform.gateway.console.site_files import CONSOLE, CONSOLE_FILES
from kvasir_platform.gateway.endpoints import Endpoints
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.http.request_head import HEALTH_LIVE, HEALTH_READY
from kvasir_platform.gateway.identity.identities import (
    EMBEDDING_SCOPES,
    OPERATE_SCOPES,
    READ_SCOPES,
    TEXT_SCOPES,
    TOKENIZE_SCOPES,
)
from kvasir_platform.gateway.openapi.document import openapi_page
from kvasir_platform.gateway.openapi.operations import CLASSIFY, DETOKENIZE, OPENAPI, RERANK, SCORE, TOKENIZE
from kvasir_platform.gateway.operator.adapters import LOAD, UNLOAD
from kvasir_platform.gateway.operator.costs_page import COSTS
from kvasir_platform.gateway.operator.decisions import DECISIONS, REGRET
from kvasir_platform.gateway.operator.drains import DRAIN, UNDRAIN, WORKERS
from kvasir_platform.gateway.operator.pages import MODELS
from kvasir_platform.gateway.operator.prefixes_page import PREFIXES
from kvasir_platform.gateway.operator.recordings import RECORDINGS
from kvasir_platform.gateway.operator.requests_page import REQUESTS
from kvasir_platform.gateway.operator.rollouts_page import ROLLOUTS
from kvasir_platform.gateway.serving.responses_api import CANCEL, INPUT_ITEMS, RESPONSES
from kvasir_platform.gateway.tenants.caller import Caller
from kvasir_platform.gateway.tenants.callers import Callers

Handler = Callable[[Exchange], None]
Route = tuple[str, Admission[Handler]]
"""The methods that a path takes, a key of ALLOWED, and whom: RequestError where it is not for whoever sent a
request."""
ALLOWED: Mapping[str, str] = {
    "GET": "GET, HEAD, OPTIONS",
    "POST": "POST, OPTIONS",
    "GET or DELETE": "GET, HEAD, DELETE, OPTIONS",
    "GET or POST": "GET, HEAD, POST, OPTIONS",
}
"""The methods of a route as the Allow header lists them."""


class Routes:
    """The routes of one listener, with or without the `console`. `now` is monotonic, in seconds."""

    def __init__(
        self, served: Endpoints, callers: Callers, now: Callable[[], float], *, console: bool
    ) -> None:
        self._served = served
        self._callers = callers
        self._now = now
        self.by_path: Mapping[str, Route] = {
            **self._tenants_table(),
            **self._operators_table(),
            **(self._console_table() if console else {}),
        }
        """Those of whole paths."""
        self._item_routes: Mapping[str, Route] = {
            MODELS + "/": ("GET", either_key(self._callers_own(served.pages.model, None))),
            DECISIONS: ("GET", self._operators(served.operate.decision)),
            RECORDINGS: ("POST", self._operators(served.operate.recording, OPERATE_SCOPES)),
            ROLLOUTS + "/": ("POST", self._operators(served.operate.rollouts, OPERATE_SCOPES)),
            **({CONSOLE_FILES: ("GET", _everyones(served.console.serve))} if console else {}),
        }

    def find(self, path: str) -> Route | None:
        """Return the route of a path, or None."""
        if (found := self.by_path.get(path)) is not None:
            return found
        if path.startswith(RESPONSES + "/"):
            return self._response_route(path)
        if (batches := self._served.batches.api.route(path)) is not None:
            return batches[0], self._callers_own(batches[1], TOKENIZE_SCOPES)
        for beginning, route in self._item_routes.items():
            if path.startswith(beginning):
                return route
        if path.startswith(WORKERS) and path.endswith((DRAIN, UNDRAIN)):
            operate = self._served.operate
            drain = operate.drain if path.endswith(DRAIN) else operate.undrain
            return "POST", self._operators(drain, OPERATE_SCOPES)
        return None

    def _tenants_table(self) -> dict[str, Route]:
        served = self._served
        api, pages, texts, vectors = served.generate, served.pages, served.texts, served.embeddings
        return {
            "/v1/chat/completions": ("POST", self._charged(api.chat)),
            "/v1/completions": ("POST", self._charged(api.completion)),
            RESPONSES: ("POST", self._charged(served.responses.create)),
            MESSAGES: ("POST", either_key(self._charged(served.messages.create))),
            COUNT_TOKENS: ("POST", either_key(self._charged(served.messages.count, 0))),
            "/v1/embeddings": ("POST", self._charged(vectors.embed, scopes=EMBEDDING_SCOPES)),
            **dict.fromkeys(CLASSIFY, ("POST", self._charged(vectors.classify, scopes=EMBEDDING_SCOPES))),
            **dict.fromkeys(RERANK, ("POST", self._charged(vectors.rerank, scopes=EMBEDDING_SCOPES))),
            **dict.fromkeys(SCORE, ("POST", self._charged(vectors.score, scopes=EMBEDDING_SCOPES))),
            **dict.fromkeys(TOKENIZE, ("POST", self._charged(texts.tokenize, 0, TOKENIZE_SCOPES))),
            **dict.fromkeys(DETOKENIZE, ("POST", self._charged(texts.detokenize, 0, TOKENIZE_SCOPES))),
            "/": ("GET", _everyones(served.about.about)),
            "/version": ("GET", self._callers_own(served.about.version, None)),
            "/ping": ("GET or POST", _everyones(pages.ready)),
            MODELS: ("GET", either_key(self._callers_own(pages.models, None))),
            HEALTH_LIVE: ("GET", _everyones(pages.live)),
            **dict.fromkeys((HEALTH_READY, "/health"), ("GET", _everyones(pages.ready))),
            OPENAPI: ("GET", _everyones(openapi_page)),
        }

    def _operators_table(self) -> dict[str, Route]:
        operate = self._served.operate
        return {
            "/metrics": ("GET", self._operators(operate.metrics)),
            "/status": ("GET", self._operators(operate.status)),
            PREFIXES: ("GET", self._operators(self._shared(PREFIXES, operate.prefixes, kept_s=SURVEYED_S))),
            COSTS: ("POST", self._operators(operate.costs)),
            REGRET: ("GET", self._operators(operate.decision)),
            REQUESTS: ("GET", self._operators(operate.requests)),
            LOAD: ("POST", self._operators(operate.adapters, OPERATE_SCOPES)),
            UNLOAD: ("POST", self._operators(operate.adapters, OPERATE_SCOPES)),
            ROLLOUTS: ("GET", self._operators(operate.rollouts)),
        }

    def _console_table(self) -> dict[str, Route]:
        """Return the routes of the console, and of the pages that its viewers share."""
        served, operate = self._served, self._served.operate
        pages = {
            path: self._shared(path, page)
            for path, page in (
                ("/status", operate.status),
                (REQUESTS, operate.requests),
                ("/metrics", operate.metrics),
            )
        }
        live = LivePages(
            {path: pages[path] for path in ("/status", REQUESTS)},
            self._now,
            time.thread_time,
            lambda: served.pages.draining,
        )
        costs = CostViews(COSTS, operate.costs, self._now)
        return {
            CONSOLE: ("GET", _everyones(served.console.serve)),
            CONSOLE_FILES + "live": ("GET", self._operators(live.serve)),
            CONSOLE_FILES + COSTS.lstrip("/"): ("GET", self._operators(costs.serve)),
            **{
                CONSOLE_FILES + path.lstrip("/"): ("GET", self._operators(page))
                for path, page in pages.items()
            },
        }

    def _response_route(self, path: str) -> Route:
        """Return the route of a path about one response."""
        responses = self._served.responses
        if path.endswith(CANCEL):
            return "POST", self._callers_own(responses.cancel)
        if path.endswith(INPUT_ITEMS):
            return "GET", self._callers_own(responses.input_items)
        return "GET or DELETE", self._callers_own(responses.show)

    def _callers_own(
        self, handler: Callable[[Caller, Exchange], None], scopes: frozenset[Scope] | None = TEXT_SCOPES
    ) -> Admission[Handler]:
        """Return a route for tenants, with the caller as argument. `scopes`: see `Callers.of`."""
        return lambda headers: partial(handler, self._callers.of(headers, scopes))

    def _charged(
        self,
        handler: Callable[[Caller, Exchange], None],
        tokens: int = 1,
        scopes: frozenset[Scope] = TEXT_SCOPES,
    ) -> Admission[Handler]:
        """Return a route for tenants whose limits would not refuse every call at this moment, which uses at
        least this many tokens, nor a body of the announced size."""

        def admit(headers: Mapping[bytes, bytes]) -> Handler:
            caller, key = self._callers.identified(headers, scopes)
            caller.check_open(tokens)
            # The parser has made sure that it is a number, if there is one.
            caller.check_body(int(headers.get(b"content-length", b"0")))

            def handle(exchange: Exchange) -> None:
                caller.charge_body(len(exchange.request.body))
                exchange.key = key
                handler(caller, exchange)

            return handle

        return admit

    def _operators(self, handler: Handler, scopes: frozenset[Scope] = READ_SCOPES) -> Admission[Handler]:
        """Return a route for operators only."""

        def admit(headers: Mapping[bytes, bytes]) -> Handler:
            self._callers.of(headers, scopes).check_operator()
            return handler

        return admit

    def _shared(self, path: str, show: Handler, kept_s: float = KEPT_S) -> Handler:
        """Return the console's handler of a page, which all its viewers share."""
        return SharedPage(path, show, self._now, kept_s=kept_s).serve


def _everyones(handler: Handler) -> Admission[Handler]:
    """Return a route that needs no key."""
    return lambda _: handler
