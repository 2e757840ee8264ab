"""The console's pages of costs, by what its viewers choose.

Reading the costs of months takes the router's time, so that viewers who choose the same share a page. What
they choose becomes the body of the page's request, which also reaches a router in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.console.shared_page import SURVEYED_S, SharedPage
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.costs import CostsViewed

MOST_KEPT = 4
"""Pages that are kept: one of months and many keys has megabytes."""


class CostViews:
    """GET of costs by day and another dimension, as in `?by=model&days=30` (CostsViewed). `show` renders the
    page at `path`; `now` is monotonic, in seconds."""

    def __init__(self, path: str, show: Callable[[Exchange], None], now: Callable[[], float]) -> None:
        self._path = path
        self._show = show
        self._now = now
        self._pages: dict[CostsViewed, SharedPage] = {}

    def serve(self, exchange: Exchange) -> None:
        """Respond at once or later. Raise RequestError 400 for a choice that there is not, CapacityError if
        too many wait for the page."""
        viewed = _viewed(exchange.request.query_fields)
        page = self._pages.pop(viewed, None)
        if page is None:
            body = msgspec.json.encode(viewed)
            page = SharedPage(self._path, self._show, self._now, kept_s=SURVEYED_S, body=body)
        # The page that was asked for last stands last.
        self._pages[viewed] = page
        if len(self._pages) > MOST_KEPT:
            del self._pages[next(iter(self._pages))]
        page.serve(exchange)


def _viewed(given: Mapping[str, str]) -> CostsViewed:
    try:
        # Texts of a query are numbers where the type says so.
        return msgspec.convert(given, CostsViewed, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"The query is invalid: {error}.", code="invalid_value") from None
