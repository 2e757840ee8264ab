"""The gateway: routes, authentication, one place where errors become answers, start and end."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kvasir.config.spec import Deployment
from kvasir.core.errors import KvasirError, RequestError
from kvasir.ports.clock import Clock, Rng
from kvasir.ports.router import RouterPort
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.spans import SpanRecorder
from kvasir_platform.gateway.api import GenerateApi, Tools, stopping
from kvasir_platform.gateway.auth import ApiKeys
from kvasir_platform.gateway.connection import HttpLimits
from kvasir_platform.gateway.decisions import DECISIONS, DecisionPages, RequestNames
from kvasir_platform.gateway.drains import DRAIN, UNDRAIN, WORKERS, DrainPages
from kvasir_platform.gateway.errors import error_headers, error_status
from kvasir_platform.gateway.http import Exchange
from kvasir_platform.gateway.listener import Listen, Listener
from kvasir_platform.gateway.pages import MODELS, Pages
from kvasir_platform.gateway.tokenization import Tokenizer, TokenizerPool

_log = logging.getLogger(__name__)
_Handler = Callable[[Exchange], None]


class Gateway:
    """The HTTP edge of one deployment.

    `serve` runs it on the running event loop until `stop` has drained it. Raises ConfigError when made
    with a broken API key file.
    """

    def __init__(
        self,
        deployment: Deployment,
        router: RouterPort,
        metrics: Metrics,
        tokenizer: Tokenizer,
        clock: Clock,
        *,
        spans: SpanRecorder | None = None,
        rng: Rng | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        spec = deployment.gateway
        self._spec = spec
        self._clock = clock
        self._wall = wall
        self._metrics = metrics
        self._rng = random.SystemRandom() if rng is None else rng
        self._spans = spans
        self._tokenizers = TokenizerPool(tokenizer)
        self._keys = None if spec.api_keys_file is None else ApiKeys(Path(spec.api_keys_file), clock.now)
        names = RequestNames(deployment.routing.decision_records)
        self._api = GenerateApi(
            Tools(deployment, router, names, self._tokenizers, metrics, spans, clock, wall, self._suffix),
            self._guard,
        )
        metrics.track_in_flight(self._api.in_flight)
        self._pages = Pages(
            deployment, router, metrics, clock, created=int(wall()), in_flight=self._api.in_flight
        )
        self._decisions = DecisionPages(router, names)
        self._drains = DrainPages(router)
        self._routes = self._route_table()
        self._listener: Listener | None = None
        self._stop = asyncio.Event()

    async def serve(self, listen: Listen | None, on_started: Callable[[str, int], None]) -> None:
        """Bind `listen` (by default the spec's address), tell `on_started` the address, and answer
        until `stop`. Returns when drained. Raises OSError when the address is taken."""
        spec = self._spec
        limits = HttpLimits(
            header_bytes=spec.max_header_bytes,
            body_bytes=spec.max_body_bytes,
            header_s=spec.header_timeout_s,
            body_s=spec.body_timeout_s,
            idle_s=spec.idle_timeout_s,
            stream_buffer_bytes=spec.stream_buffer_bytes,
        )
        self._listener = Listener(
            handler=self._handle,
            on_refused=lambda error: self._metrics.request_refused(error.code),
            limits=limits,
            max_connections=spec.max_connections,
            new_id=self._new_id,
            now=self._clock.now,
            wall=self._wall,
        )
        host, port = await self._listener.open(listen or (spec.host, spec.port))
        on_started(host, port)
        try:
            await self._stop.wait()
            self._pages.draining = True
            await self._listener.drain(spec.drain_timeout_s)
            self._api.abandon_all(stopping())
        finally:
            await self._listener.close()
            self._tokenizers.close()
            if self._spans is not None:
                self._spans.close()

    def stop(self) -> None:
        """Begin to drain; `serve` returns within the spec's `drain_timeout_s`. Idempotent."""
        self._stop.set()

    def _route_table(self) -> dict[str, tuple[str, bool, _Handler]]:
        """Path to method, whether a key is needed, and handler."""
        api, pages = self._api, self._pages
        return {
            "/v1/chat/completions": ("POST", True, api.chat),
            "/v1/completions": ("POST", True, api.completion),
            MODELS: ("GET", True, pages.models),
            "/health/live": ("GET", False, pages.live),
            "/health/ready": ("GET", False, pages.ready),
            "/metrics": ("GET", True, pages.metrics),
            "/status": ("GET", True, pages.status),
        }

    def _item_route(self, path: str) -> tuple[str, bool, _Handler] | None:
        """As the table's, for paths that end with a name."""
        if path.startswith(MODELS + "/"):
            return "GET", True, self._pages.model
        if path.startswith(DECISIONS):
            return "GET", True, self._decisions.decision
        if path.startswith(WORKERS) and path.endswith(DRAIN):
            return "POST", True, self._drains.drain
        if path.startswith(WORKERS) and path.endswith(UNDRAIN):
            return "POST", True, self._drains.undrain
        return None

    def _handle(self, exchange: Exchange) -> None:
        self._guard(exchange, lambda: self._dispatch(exchange))

    def _dispatch(self, exchange: Exchange) -> None:
        request = exchange.request
        route = self._routes.get(request.path) or self._item_route(request.path)
        if route is None:
            raise RequestError(f"There is no {request.path[:256]!r} here.", status=404, code="not_found")
        method, protected, handler = route
        if protected and self._keys is not None:
            self._keys.check(request.headers.get(b"authorization"))
        if request.method != method and not (method == "GET" and request.method == "HEAD"):
            raise _MethodNotAllowed(request.path, method)
        if method == "POST":
            _check_media_type(request.headers)
        handler(exchange)

    def _guard(self, exchange: Exchange, step: Callable[[], None]) -> None:
        """Run a step of an exchange; what it raises becomes the answer."""
        try:
            step()
        except KvasirError as error:
            self._metrics.request_refused(error.code)
            headers = error_headers(error)
            if isinstance(error, _MethodNotAllowed):
                headers = b"allow: %b\r\n" % error.allowed.encode()
            exchange.fail(error_status(error), error, headers)
        # The last line of defence: a fault of ours must still be an answer, and must not end the server.
        except Exception as error:  # noqa: BLE001
            _log.error("a request failed", extra={"request_id": exchange.request_id}, exc_info=error)
            self._metrics.request_refused("internal_error")
            exchange.fail(500, error)

    def _new_id(self) -> str:
        return f"{self._rng.getrandbits(96):024x}"

    def _suffix(self) -> str:
        return f"{self._rng.getrandbits(32):08x}"


class _MethodNotAllowed(RequestError):
    def __init__(self, path: str, allowed: str) -> None:
        super().__init__(f"{path} takes {allowed} only.", status=405, code="method_not_allowed")
        self.allowed = allowed


def _check_media_type(headers: Mapping[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if kind != b"application/json" or encoding != b"identity":
        raise RequestError(
            "Send the body as plain application/json.", status=415, code="unsupported_media_type"
        )
