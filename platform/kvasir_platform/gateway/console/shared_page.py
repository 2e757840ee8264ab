"""One page of data for any number of viewers.

The console needs it every second. What that costs the router must not grow with the number of viewers, so a
page is rendered once a second at most and its bytes go to all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvasir.core.errors import CapacityError
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.http.inner_exchange import InnerExchange

KEPT_S = 0.9
"""A little less than the console's interval, so that each of its calls gets a new page."""
SURVEYED_S = 9.0
"""The same for a page that takes more work, and changes slowly."""
MOST_WAITING = 64
"""Viewers that may wait for a page which another process renders."""


@dataclass(frozen=True, slots=True)
class _Page:
    at_s: float
    status: int
    body: bytes
    content_type: bytes
    headers: bytes

    def send(self, exchange: Exchange) -> None:
        """Respond with it."""
        exchange.respond(self.status, self.body, self.content_type, self.headers)


class SharedPage:
    """GET of the page at `path`, which `show` renders at once or later of `body`, and which is kept for
    `kept_s`. `now` is in seconds."""

    def __init__(
        self,
        path: str,
        show: Callable[[Exchange], None],
        now: Callable[[], float],
        *,
        kept_s: float = KEPT_S,
        body: bytes = b"",
    ) -> None:
        self._path = path
        self._show = show
        self._now = now
        self._kept_s = kept_s
        self._body = body
        self._page: _Page | None = None
        self._waiting: list[Exchange] = []

    def serve(self, exchange: Exchange) -> None:
        """Respond with the page of the last second, or with the next one. Raise CapacityError if too many
        wait for it."""
        page = self._page
        if page is not None and self._now() - page.at_s < self._kept_s:
            page.send(exchange)
            return
        self._waiting = [each for each in self._waiting if each.open]
        if len(self._waiting) >= MOST_WAITING:
            raise CapacityError("Too many viewers wait for this page.", code="no_capacity", retry_after_s=1.0)
        self._waiting.append(exchange)
        if len(self._waiting) == 1:
            self._render()

    def _render(self) -> None:
        try:
            self._show(InnerExchange("GET", self._path, self._body, self._rendered))
        except Exception:
            # The only one that waits gets the error, and the next viewer asks again.
            self._waiting.clear()
            raise

    def _rendered(self, status: int, body: bytes, content_type: bytes, headers: bytes) -> None:
        page = _Page(self._now(), status, body, content_type, headers)
        self._page = page if status == 200 else None
        waiting, self._waiting = self._waiting, []
        for exchange in waiting:
            page.send(exchange)
