"""Pages about the whole deployment, rendered in the core for edges."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from kvasir.core.errors import KvasirError, RequestError
from kvasir.native import StreamGaps
from kvasir.telemetry.metrics import CONTENT_TYPE
from kvasir_platform.edge.edge_metrics import EdgeMetrics
from kvasir_platform.edge.frames import PageRequest, PageResponse
from kvasir_platform.gateway.http.exchange import JSON, Exchange, HttpRequest
from kvasir_platform.gateway.operator.adapters import LOAD, UNLOAD
from kvasir_platform.gateway.operator.decisions import DECISIONS, REGRET
from kvasir_platform.gateway.operator.drains import DRAIN, UNDRAIN, WORKERS
from kvasir_platform.gateway.operator.recordings import RECORDINGS

log = logging.getLogger(__name__)


class PageRenderer(Protocol):
    """Responds to an exchange, or raises KvasirError."""

    def __call__(self, exchange: Exchange) -> None: ...


class CorePages:
    """Serves page requests of edges. `status` renders the page of that name; `adapters` loads and
    unloads them; `decision`, `recording`, `drain` and `undrain` are for paths that end with a name."""

    def __init__(
        self,
        figures: EdgeMetrics,
        *,
        status: PageRenderer,
        decision: PageRenderer,
        drain: PageRenderer,
        undrain: PageRenderer,
        adapters: PageRenderer,
        recording: PageRenderer,
    ) -> None:
        self._figures = figures
        self._status = status
        self._decision = decision
        self._drain = drain
        self._undrain = undrain
        self._adapters = adapters
        self._recording = recording

    def show(self, ask: PageRequest, then: Callable[[PageResponse], None]) -> None:
        """Call `then` once with the page, or with the error."""
        if ask.path == "/metrics":
            self._figures.collect(lambda page: then(PageResponse(ask.number, 200, CONTENT_TYPE, b"", page)))
            return
        exchange = _Asked(ask, then)
        try:
            self._page(ask.path)(exchange)
        except KvasirError as error:
            exchange.fail(error)
        # As in the gateway, an internal error must still produce a response.
        except Exception as error:
            log.exception("cannot render the page %s", ask.path)
            exchange.fail(error)

    def _page(self, path: str) -> PageRenderer:
        if path == "/status":
            return self._status
        if path in (LOAD, UNLOAD):
            return self._adapters
        if path == REGRET or path.startswith(DECISIONS):
            return self._decision
        if path.startswith(RECORDINGS):
            return self._recording
        if path.startswith(WORKERS) and path.endswith(DRAIN):
            return self._drain
        if path.startswith(WORKERS) and path.endswith(UNDRAIN):
            return self._undrain
        raise RequestError(f"No such path: {path[:256]!r}.", status=404, code="not_found")


class _Asked(Exchange):
    """An exchange whose response goes to the edge that has the client."""

    __slots__ = ("_number", "_then")

    def __init__(self, ask: PageRequest, then: Callable[[PageResponse], None]) -> None:
        request = HttpRequest(ask.method, ask.path, {}, ask.body, keep_alive=True, chunked=True)
        super().__init__(request, "", 0.0, _Nowhere())
        self._number = ask.number
        self._then = then

    def respond(self, status: int, body: bytes, content_type: bytes = JSON, headers: bytes = b"") -> None:
        """Pass on the response."""
        if self._open:
            self._open = False
            self._then(PageResponse(self._number, status, content_type, headers, body))


class _Nowhere:
    """An ExchangeWire without a client."""

    lagging = False

    def write(self, data: bytes) -> None:
        """There is no client."""

    def lane(self, before: bytes, after: bytes, *, chunked: bool, gaps: StreamGaps) -> None:
        """None: nothing streams to it."""

    def answered(self, *, close: bool) -> None:
        """There is no connection to close."""

    def date(self) -> bytes:
        """The edge adds its own."""
        return b""
