"""Pages about the whole deployment, rendered in the core for edges."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvasir.core.errors import KvasirError, RequestError
from kvasir.telemetry.metrics import CONTENT_TYPE
from kvasir_platform.edge.edge_metrics import EdgeMetrics
from kvasir_platform.edge.frames import PageRequest, PageResponse
from kvasir_platform.gateway.http.inner_exchange import InnerExchange
from kvasir_platform.gateway.operator.adapters import LOAD, UNLOAD
from kvasir_platform.gateway.operator.costs_page import COSTS
from kvasir_platform.gateway.operator.decisions import DECISIONS, REGRET
from kvasir_platform.gateway.operator.drains import DRAIN, UNDRAIN, WORKERS
from kvasir_platform.gateway.operator.operators import OperatorPages, Show
from kvasir_platform.gateway.operator.prefixes_page import PREFIXES
from kvasir_platform.gateway.operator.recordings import RECORDINGS
from kvasir_platform.gateway.operator.requests_page import REQUESTS
from kvasir_platform.gateway.operator.rollouts_page import ROLLOUTS

log = logging.getLogger(__name__)


class CorePages:
    """Serves page requests of edges with the pages of the core, but for the metrics, which are those of all
    processes."""

    def __init__(self, figures: EdgeMetrics, pages: OperatorPages) -> None:
        self._figures = figures
        self._pages = pages
        self._named = {
            "/status": pages.status,
            REQUESTS: pages.requests,
            PREFIXES: pages.prefixes,
            COSTS: pages.costs,
            LOAD: pages.adapters,
            UNLOAD: pages.adapters,
            REGRET: pages.decision,
        }

    def show(self, ask: PageRequest, then: Callable[[PageResponse], None]) -> None:
        """Call `then` once with the page, or with the error."""
        if ask.path == "/metrics":
            self._figures.collect(lambda page: then(PageResponse(ask.number, 200, CONTENT_TYPE, b"", page)))
            return
        exchange = InnerExchange(
            ask.method,
            ask.path,
            ask.body,
            lambda status, body, kind, headers: then(PageResponse(ask.number, status, kind, headers, body)),
        )
        try:
            self._page(ask.path)(exchange)
        except KvasirError as error:
            exchange.fail(error)
        # As in the gateway, an internal error must still produce a response.
        except Exception as error:
            log.exception("cannot render the page %s", ask.path)
            exchange.fail(error)

    def _page(self, path: str) -> Show:
        if (page := self._named.get(path)) is not None:
            return page
        if path.startswith(DECISIONS):
            return self._pages.decision
        if path.startswith(RECORDINGS):
            return self._pages.recording
        if path.startswith(ROLLOUTS):
            return self._pages.rollouts
        if path.startswith(WORKERS) and path.endswith(DRAIN):
            return self._pages.drain
        if path.startswith(WORKERS) and path.endswith(UNDRAIN):
            return self._pages.undrain
        raise RequestError(f"No such path: {path[:256]!r}.", status=404, code="not_found")
