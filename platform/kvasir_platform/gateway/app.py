"""The gateway: routes, authentication, error handling, start and shutdown."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from functools import partial

from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.tenants import Scope
from kvasir.core.errors import RequestError
from kvasir.ports.clock import Clock, Rng
from kvasir.ports.responses import ResponseStore
from kvasir.ports.router import RouterPort
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.spans import SpanRecorder
from kvasir_platform.gateway.anthropic.endpoints import COUNT_TOKENS, MESSAGES, either_key, error_format
from kvasir_platform.gateway.batches.schema import FILES
from kvasir_platform.gateway.batches.service import BatchService
from kvasir_platform.gateway.catalog.models import ModelTable
from kvasir_platform.gateway.console.shared_page import KEPT_S, SURVEYED_S, SharedPage
from kvasir_platform.gateway.console.site_files import CONSOLE, CONSOLE_FILES, ConsoleSite
from kvasir_platform.gateway.costs.keeper import CostKeeper
from kvasir_platform.gateway.filters.build import OutputFilters
from kvasir_platform.gateway.http.cors import Cors
from kvasir_platform.gateway.http.errors import MethodNotAllowed
from kvasir_platform.gateway.http.exchange import Exchange, HttpRequest
from kvasir_platform.gateway.http.listener import Listen, Listener
from kvasir_platform.gateway.http.request_head import HEALTH_LIVE, HEALTH_READY, METHODS, check_media_type
from kvasir_platform.gateway.identity.identities import (
    EMBEDDING_SCOPES,
    OPERATE_SCOPES,
    READ_SCOPES,
    TEXT_SCOPES,
    TOKENIZE_SCOPES,
)
from kvasir_platform.gateway.identity.providers import KeysPending
from kvasir_platform.gateway.openapi.document import openapi_page
from kvasir_platform.gateway.openapi.operations import DETOKENIZE, OPENAPI, RERANK, SCORE, TOKENIZE
from kvasir_platform.gateway.operator.about_page import AboutPages
from kvasir_platform.gateway.operator.adapters import LOAD, UNLOAD
from kvasir_platform.gateway.operator.costs_page import COSTS
from kvasir_platform.gateway.operator.decisions import DECISIONS, REGRET
from kvasir_platform.gateway.operator.drains import DRAIN, UNDRAIN, WORKERS
from kvasir_platform.gateway.operator.operators import operators_here, remote_operators
from kvasir_platform.gateway.operator.pages import MODELS, Pages
from kvasir_platform.gateway.operator.prefixes_page import PREFIXES
from kvasir_platform.gateway.operator.recordings import RECORDINGS
from kvasir_platform.gateway.operator.requests_page import REQUESTS
from kvasir_platform.gateway.operator.rollouts_page import ROLLOUTS
from kvasir_platform.gateway.responses.memory_store import MemoryResponses
from kvasir_platform.gateway.serving.context import GatewayContext
from kvasir_platform.gateway.serving.embedding_api import EmbeddingApi
from kvasir_platform.gateway.serving.error_answers import ErrorAnswers
from kvasir_platform.gateway.serving.generate_api import GenerateApi, stopping
from kvasir_platform.gateway.serving.messages_api import MessagesApi
from kvasir_platform.gateway.serving.remote_core import RemoteCore
from kvasir_platform.gateway.serving.responses_api import CANCEL, INPUT_ITEMS, RESPONSES, ResponsesApi
from kvasir_platform.gateway.serving.tokenize_api import TextApi
from kvasir_platform.gateway.tenants.caller import Caller
from kvasir_platform.gateway.tenants.callers import Callers
from kvasir_platform.gateway.tenants.prefix_prompts import shared_prefixes
from kvasir_platform.gateway.traffic.rollouts import Rollouts
from kvasir_platform.gateway.traffic.setup import counted, traffic_parts

_log = logging.getLogger(__name__)
_Handler = Callable[[Exchange], None]
_Admit = Callable[[Mapping[bytes, bytes]], _Handler]
"""From a request's headers to what handles it, or RequestError where it is not for whoever sent it."""
_Route = tuple[str, _Admit]
"""The method that a path takes, and whom."""
_ALLOWED: Mapping[str, str] = {
    "GET": "GET, HEAD, OPTIONS",
    "POST": "POST, OPTIONS",
    "GET or DELETE": "GET, HEAD, DELETE, OPTIONS",
    "GET or POST": "GET, HEAD, POST, OPTIONS",
}
"""The methods of a route as the Allow header lists them."""


class Gateway:
    """The HTTP edge of one deployment.

    `serve` runs it on the running event loop until `stop` has drained it.
    """

    def __init__(
        self,
        deployment: Deployment,
        router: RouterPort | RemoteCore,
        metrics: Metrics,
        models: ModelTable,
        clock: Clock,
        *,
        callers: Callers,
        filters: OutputFilters,
        rollouts: Rollouts | None = None,
        spans: SpanRecorder | None = None,
        costs: CostKeeper | None = None,
        rng: Rng | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        spec = deployment.gateway
        self._spec = spec
        self._stop = asyncio.Event()
        self._clock = clock
        self._wall = wall
        self._metrics = metrics
        self._rng = random.SystemRandom() if rng is None else rng
        self._spans = spans
        self._models = models
        self._callers = callers
        self._filters = filters
        self._cors = Cors(spec.cors, open_to_all=not spec.authenticates)
        if isinstance(router, RemoteCore):
            requests, shares, self._operate = router.router, router.shares, remote_operators(router)
            stored: ResponseStore = router.responses
        else:
            requests, shares = counted(router, rollouts)
            stored = MemoryResponses(spec.responses, clock.now)
            self._operate = operators_here(
                deployment,
                models,
                router,
                metrics,
                clock,
                in_flight=self._in_flight,
                draining=self._stop.is_set,
                rollouts=rollouts,
                costs=costs,
            )
        models.loaded = requests.adapters
        self._errors = ErrorAnswers(metrics)
        context = GatewayContext(
            deployment,
            requests,
            self._operate.names,
            models,
            self._errors,
            metrics,
            filters,
            spans,
            clock,
            wall,
            self._suffix,
            shared_prefixes(deployment, models),
            traffic_parts(deployment, models, requests, shares, self._suffix, metrics=metrics, clock=clock),
        )
        self._api = GenerateApi(context)
        self._responses = ResponsesApi(context, self._api, stored)
        self._messages = MessagesApi(context, self._api)
        self._embeddings = EmbeddingApi(context)
        self._texts = TextApi(context)
        self._batches = BatchService(
            spec,
            callers,
            (self._api.chat, self._api.completion, self._embeddings.embed, self._responses.create),
            answer=self._errors.answer,
            new_id=self._new_id,
            clock=clock,
            wall=wall,
            rng=self._rng,
        )
        metrics.track_in_flight(self._in_flight)
        metrics.track_tenants(callers.figures)
        metrics.track_batches(lambda: self._batches.stats)
        for model in models.models:
            metrics.track_tokenizer(model.name, model.tokenizer.sizes)
        self._pages = Pages(models, requests, created=int(wall()))
        self._about = AboutPages(models, keyed=spec.authenticates, secure=spec.tls.cert_file is not None)
        self._console = ConsoleSite()
        self._routes = self._route_table()
        self._item_routes: dict[str, _Route] = {
            MODELS + "/": ("GET", either_key(self._callers_own(self._pages.model, None))),
            DECISIONS: ("GET", self._operators(self._operate.decision)),
            RECORDINGS: ("POST", self._operators(self._operate.recording, OPERATE_SCOPES)),
            ROLLOUTS + "/": ("POST", self._operators(self._operate.rollouts, OPERATE_SCOPES)),
            CONSOLE_FILES: ("GET", _everyones(self._console.serve)),
        }
        self._listener: Listener | None = None

    async def serve(self, listen: Listen | None, on_started: Callable[[str, int], None]) -> None:
        """Bind `listen` (by default the spec's address), call `on_started` with the address, and serve until
        `stop`. Return when drained. Raise OSError if the address is taken, ConfigError for invalid
        certificates."""
        spec = self._spec
        self._listener = Listener(
            spec,
            handler=self._handle,
            early=self._admit,
            cors=self._cors,
            errors=error_format,
            on_refused=lambda error: self._metrics.request_refused(error.code),
            new_id=self._new_id,
            now=self._clock.now,
            wall=self._wall,
        )
        if self._listener.certificate is not None:
            self._metrics.track_certificate(self._listener.certificate.expires_s)
        host, port = await self._listener.open(listen or (spec.host, spec.port))
        on_started(host, port)
        counting = asyncio.create_task(self._callers.run(), name="tenants")
        counting.add_done_callback(self._stop_on_fault)
        self._batches.start()
        try:
            await self._stop.wait()
            self._pages.draining = True
            self._batches.stop()
            await self._listener.drain(spec.drain_timeout_s)
            self._api.abandon_all(stopping())
            self._embeddings.abandon_all(stopping())
        finally:
            await self._batches.close()
            await self._listener.close()
            await self._filters.close()
            counting.cancel()
            await asyncio.wait([counting])
            self._models.close()
            if self._spans is not None:
                self._spans.close()
        if not counting.cancelled():
            # A fault of it stopped the gateway, and is to be heard.
            counting.result()

    def stop(self) -> None:
        """Begin to drain; `serve` returns within the spec's `drain_timeout_s`. Idempotent."""
        self._stop.set()

    def _stop_on_fault(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.stop()

    def _route_table(self) -> dict[str, _Route]:
        """Return the routes by path."""
        api, pages, texts, vectors = self._api, self._pages, self._texts, self._embeddings
        operate = self._operate
        return {
            "/v1/chat/completions": ("POST", self._charged(api.chat)),
            "/v1/completions": ("POST", self._charged(api.completion)),
            RESPONSES: ("POST", self._charged(self._responses.create)),
            MESSAGES: ("POST", either_key(self._charged(self._messages.create))),
            COUNT_TOKENS: ("POST", either_key(self._charged(self._messages.count, 0))),
            "/v1/embeddings": ("POST", self._charged(vectors.embed, scopes=EMBEDDING_SCOPES)),
            **dict.fromkeys(RERANK, ("POST", self._charged(vectors.rerank, scopes=EMBEDDING_SCOPES))),
            **dict.fromkeys(SCORE, ("POST", self._charged(vectors.score, scopes=EMBEDDING_SCOPES))),
            **dict.fromkeys(TOKENIZE, ("POST", self._charged(texts.tokenize, 0, TOKENIZE_SCOPES))),
            **dict.fromkeys(DETOKENIZE, ("POST", self._charged(texts.detokenize, 0, TOKENIZE_SCOPES))),
            "/": ("GET", _everyones(self._about.about)),
            "/version": ("GET", self._callers_own(self._about.version, None)),
            "/ping": ("GET or POST", _everyones(pages.ready)),
            MODELS: ("GET", either_key(self._callers_own(pages.models, None))),
            HEALTH_LIVE: ("GET", _everyones(pages.live)),
            **dict.fromkeys((HEALTH_READY, "/health"), ("GET", _everyones(pages.ready))),
            "/metrics": ("GET", self._operators(operate.metrics)),
            "/status": ("GET", self._operators(operate.status)),
            CONSOLE: ("GET", _everyones(self._console.serve)),
            PREFIXES: ("GET", self._operators(self._shared(PREFIXES, operate.prefixes, kept_s=SURVEYED_S))),
            **{
                CONSOLE_FILES + path.lstrip("/"): ("GET", self._operators(self._shared(path, page)))
                for path, page in (
                    ("/status", operate.status),
                    (REQUESTS, operate.requests),
                    ("/metrics", operate.metrics),
                    (COSTS, operate.costs),
                )
            },
            COSTS: ("POST", self._operators(operate.costs)),
            REGRET: ("GET", self._operators(operate.decision)),
            REQUESTS: ("GET", self._operators(operate.requests)),
            LOAD: ("POST", self._operators(operate.adapters, OPERATE_SCOPES)),
            UNLOAD: ("POST", self._operators(operate.adapters, OPERATE_SCOPES)),
            ROLLOUTS: ("GET", self._operators(operate.rollouts)),
            OPENAPI: ("GET", _everyones(openapi_page)),
        }

    def _route(self, path: str) -> _Route | None:
        """Return the route of a path, or None."""
        if (found := self._routes.get(path)) is not None:
            return found
        if path.startswith(RESPONSES + "/"):
            return self._response_route(path)
        if (batches := self._batches.api.route(path)) is not None:
            return batches[0], self._callers_own(batches[1], TOKENIZE_SCOPES)
        for beginning, route in self._item_routes.items():
            if path.startswith(beginning):
                return route
        if path.startswith(WORKERS) and path.endswith((DRAIN, UNDRAIN)):
            operate = self._operate
            drain = operate.drain if path.endswith(DRAIN) else operate.undrain
            return "POST", self._operators(drain, OPERATE_SCOPES)
        return None

    def _response_route(self, path: str) -> _Route:
        """Return the route of a path about one response."""
        responses = self._responses
        if path.endswith(CANCEL):
            return "POST", self._callers_own(responses.cancel)
        if path.endswith(INPUT_ITEMS):
            return "GET", self._callers_own(responses.input_items)
        return "GET or DELETE", self._callers_own(responses.show)

    def _callers_own(
        self, handler: Callable[[Caller, Exchange], None], scopes: frozenset[Scope] | None = TEXT_SCOPES
    ) -> _Admit:
        """Return a route for tenants, with the caller as argument. `scopes`: see `Callers.of`."""
        return lambda headers: partial(handler, self._callers.of(headers, scopes))

    def _charged(
        self,
        handler: Callable[[Caller, Exchange], None],
        tokens: int = 1,
        scopes: frozenset[Scope] = TEXT_SCOPES,
    ) -> _Admit:
        """Return a route for tenants whose limits would not refuse every call at this moment, which uses at
        least this many tokens, nor a body of the announced size."""

        def admit(headers: Mapping[bytes, bytes]) -> _Handler:
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

    def _operators(self, handler: _Handler, scopes: frozenset[Scope] = READ_SCOPES) -> _Admit:
        """Return a route for operators only."""

        def admit(headers: Mapping[bytes, bytes]) -> _Handler:
            self._callers.of(headers, scopes).check_operator()
            return handler

        return admit

    def _shared(self, path: str, show: _Handler, kept_s: float = KEPT_S) -> _Handler:
        """Return the console's handler of a page, which all its viewers share."""
        return SharedPage(path, show, self._clock.now, kept_s=kept_s).serve

    def _handle(self, exchange: Exchange, *, again: bool = False) -> None:
        try:
            self._admit(exchange.request)(exchange)
        except KeysPending as pending:
            if again or pending.then is None:
                self._errors.answer(exchange, pending)
            else:
                pending.then(lambda: self._handle(exchange, again=True))
        # The last line of defence: a fault of ours must still be an answer, and must not end the server.
        except Exception as error:  # noqa: BLE001
            self._errors.answer(exchange, error)

    def _admit(self, request: HttpRequest) -> _Handler:
        """Return the handler of a request, by its head only. Raise RequestError."""
        if request.method == "OPTIONS":
            return self._options
        route = self._route(request.path)
        if route is None:
            raise RequestError(f"There is no {request.path[:256]!r} here.", status=404, code="not_found")
        method, admit = route
        self._cors.check(request.headers)
        handler = admit(request.headers)
        if request.method not in _ALLOWED[method].split(", "):
            raise MethodNotAllowed(request.path, _ALLOWED[method])
        if request.method == "POST":
            check_media_type(request.headers, form=request.path == FILES)
        return handler

    def _options(self, exchange: Exchange) -> None:
        """OPTIONS: CORS preflight requests, and the allowed methods. Needs no key."""
        request = exchange.request
        route = self._route(request.path)
        if route is None and request.path != "*":
            raise RequestError(f"There is no {request.path[:256]!r} here.", status=404, code="not_found")
        preflight = self._cors.preflight(request.headers) if self._cors.enabled else None
        allowed = METHODS if route is None else _ALLOWED[route[0]]
        exchange.no_content(b"allow: %b\r\n" % allowed.encode() if preflight is None else preflight)

    def _in_flight(self) -> int:
        """Return the number of calls in the router."""
        return self._api.in_flight() + self._embeddings.in_flight()

    def _new_id(self) -> str:
        return f"{self._rng.getrandbits(96):024x}"

    def _suffix(self) -> str:
        return f"{self._rng.getrandbits(32):08x}"


def _everyones(handler: _Handler) -> _Admit:
    """Return a route that needs no key."""
    return lambda _: handler
