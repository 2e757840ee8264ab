"""The gateway: from a request to the handler of its route, error handling, start and shutdown."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from functools import partial

from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.edge import GatewaySpec
from kvasir.core.errors import ConfigError, RequestError
from kvasir.ports.clock import Clock, Rng
from kvasir.ports.router import RouterPort
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.spans import SpanRecorder
from kvasir_platform.gateway.anthropic.endpoints import error_format
from kvasir_platform.gateway.batches.schema import FILES
from kvasir_platform.gateway.catalog.models import ModelTable
from kvasir_platform.gateway.costs.keeper import CostKeeper
from kvasir_platform.gateway.endpoints import endpoints, gateway_context, routed_core
from kvasir_platform.gateway.filters.build import OutputFilters
from kvasir_platform.gateway.http.cors import Cors
from kvasir_platform.gateway.http.errors import MethodNotAllowed
from kvasir_platform.gateway.http.exchange import Exchange, HttpRequest
from kvasir_platform.gateway.http.listener import Listen, Listener
from kvasir_platform.gateway.http.request_head import METHODS, check_media_type
from kvasir_platform.gateway.identity.providers import KeysPending
from kvasir_platform.gateway.routes import ALLOWED, Handler, Routes
from kvasir_platform.gateway.serving.generate_api import stopping
from kvasir_platform.gateway.serving.remote_core import RemoteCore
from kvasir_platform.gateway.tenants.callers import Callers
from kvasir_platform.gateway.traffic.rollouts import Rollouts


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
        core = routed_core(
            deployment,
            router,
            models,
            metrics,
            clock,
            in_flight=self._in_flight,
            draining=self._stop.is_set,
            rollouts=rollouts,
            costs=costs,
        )
        models.loaded = core.requests.adapters
        context = gateway_context(
            deployment,
            core,
            models,
            metrics,
            clock,
            filters=filters,
            spans=spans,
            wall=wall,
            suffix=self._suffix,
        )
        self._errors = context.errors
        self._fetches = context.media_fetches
        self._served = endpoints(context, core, callers, new_id=self._new_id, rng=self._rng)
        apart = spec.console.port is not None
        self._routes = Routes(self._served, callers, clock.now, console=not apart)
        self._console_routes = Routes(self._served, callers, clock.now, console=True) if apart else None
        self._track()
        self._listeners: list[Listener] = []

    async def serve(
        self,
        listen: Listen | None,
        on_started: Callable[[str, int], None],
        console: Listen | None = None,
    ) -> None:
        """Bind `listen` and, if the console has a port of its own, `console` (by default the spec's
        addresses), call `on_started` with the address of the former, and serve until `stop`. Return when
        drained. Raise OSError if the address is taken, ConfigError if that of the console is, for invalid
        certificates, or for a storage of batches that cannot be used."""
        spec = self._spec
        await self._served.batches.check()
        listener = self._listening(self._routes)
        if listener.certificate is not None:
            self._metrics.track_certificate(listener.certificate.expires_s)
        host, port = await listener.open(listen or (spec.host, spec.port))
        if self._console_routes is not None and spec.console.port is not None:
            try:
                own = self._listening(self._console_routes)
                await own.open(console or (spec.console.host, spec.console.port))
            except OSError as error:
                await listener.close()
                raise console_taken(spec, error) from error
        on_started(host, port)
        counting = asyncio.create_task(self._callers.run(), name="tenants")
        counting.add_done_callback(self._stop_on_fault)
        self._served.batches.start()
        try:
            await self._stop.wait()
            self._served.pages.draining = True
            self._served.batches.stop()
            await asyncio.gather(*(each.drain(spec.drain_timeout_s) for each in self._listeners))
            self._served.generate.abandon_all(stopping())
            self._served.embeddings.abandon_all(stopping())
        finally:
            await self._served.batches.close()
            for each in self._listeners:
                await each.close()
            await self._filters.close()
            if self._fetches is not None:
                await self._fetches.close()
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

    def _track(self) -> None:
        """Have the metrics read what the gateway counts itself."""
        metrics, served = self._metrics, self._served
        metrics.track_in_flight(served.in_flight)
        metrics.track_tenants(self._callers.figures)
        metrics.track_batches(lambda: served.batches.stats)
        for model in self._models.models:
            metrics.track_tokenizer(model.name, model.tokenizer.sizes)

    def _stop_on_fault(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.stop()

    def _listening(self, routes: Routes) -> Listener:
        """Return a listener, not yet open, that serves these routes."""
        made = Listener(
            self._spec,
            handler=partial(self._handle, routes),
            early=partial(self._admit_body, routes),
            cors=self._cors,
            errors=error_format,
            on_refused=lambda error: self._metrics.request_refused(error.code),
            new_id=self._new_id,
            now=self._clock.now,
            wall=self._wall,
        )
        self._listeners.append(made)
        return made

    def _handle(self, routes: Routes, exchange: Exchange, *, again: bool = False) -> None:
        try:
            self._admit(routes, exchange.request)(exchange)
        except KeysPending as pending:
            if again or pending.then is None:
                self._errors.answer(exchange, pending)
            else:
                pending.then(lambda: self._handle(routes, exchange, again=True))
        except Exception as error:  # noqa: BLE001 - a fault of ours is still an answer, and does not end the server
            self._errors.answer(exchange, error)

    def _admit(self, routes: Routes, request: HttpRequest) -> Handler:
        """Return the handler of a request, by its head only. Raise RequestError."""
        if request.method == "OPTIONS":
            return partial(self._options, routes)
        route = routes.find(request.path)
        if route is None:
            raise RequestError(f"There is no {request.path[:256]!r} here.", status=404, code="not_found")
        method, admit = route
        self._cors.check(request.headers)
        handler = admit(request.headers)
        if request.method not in ALLOWED[method].split(", "):
            raise MethodNotAllowed(request.path, ALLOWED[method])
        if request.method == "POST":
            check_media_type(request.headers, form=request.path == FILES)
        return handler

    def _admit_body(self, routes: Routes, request: HttpRequest) -> bool:
        """Return whether the body is a form with a file, by the head only. Raise RequestError."""
        self._admit(routes, request)
        return self._served.batches.api.is_upload(request)

    def _options(self, routes: Routes, exchange: Exchange) -> None:
        """OPTIONS: CORS preflight requests, and the allowed methods. Needs no key."""
        request = exchange.request
        route = routes.find(request.path)
        if route is None and request.path != "*":
            raise RequestError(f"There is no {request.path[:256]!r} here.", status=404, code="not_found")
        preflight = self._cors.preflight(request.headers) if self._cors.enabled else None
        allowed = METHODS if route is None else ALLOWED[route[0]]
        exchange.no_content(b"allow: %b\r\n" % allowed.encode() if preflight is None else preflight)

    def _in_flight(self) -> int:
        return self._served.in_flight()

    def _new_id(self) -> str:
        return f"{self._rng.getrandbits(96):024x}"

    def _suffix(self) -> str:
        return f"{self._rng.getrandbits(32):08x}"


def console_taken(spec: GatewaySpec, error: OSError) -> ConfigError:
    """Return what is said of an address for the console that cannot be bound."""
    return ConfigError(
        f"gateway.console: cannot listen on {spec.console.host}:{spec.console.port}: {error.strerror}; "
        "choose another port"
    )
