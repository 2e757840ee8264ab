"""Pages of data as events, one stream for each viewer of the console.

A page is rendered once a second for all viewers together, if one of them wants it, and less often in a fleet
so large that viewers would take more than a small part of a core from serving. Streams end after some
minutes, so that a key that no longer lets its owner in is asked for again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvasir.core.errors import CapacityError, KvasirError, RequestError
from kvasir_platform.gateway.http.exchange import EVENT_STREAM, Exchange
from kvasir_platform.gateway.http.inner_exchange import InnerExchange, Rendered

log = logging.getLogger(__name__)

EVERY_S = 1.0
MOST_SHARE = 0.018
"""The part of a core that rendering takes at most: pages that cost more come less often. With the writes to
viewers, which the loop does later, it is 2 %."""
MOST_EVERY_S = 10.0
"""Not less often than this, whatever they cost."""
MOST_VIEWERS = 64
STREAM_S = 300.0
"""After this long a stream ends, and its viewer asks for the next one."""


class _Viewer(NamedTuple):
    exchange: Exchange
    since_s: float
    paths: frozenset[str]


class LivePages:
    """GET of a stream with an event for each of `pages` at once and every EVERY_S, or less often within
    MOST_SHARE: its name, and its body as data, or that of its error. `pages` are by path; the query may name
    those that the viewer wants, as in `?pages=status,requests`. A viewer that reads too slowly misses events.
    `now` is monotonic, in seconds; `spent` the CPU seconds of this thread; while the gateway is `draining`,
    streams end."""

    def __init__(
        self,
        pages: Mapping[str, Callable[[Exchange], None]],
        now: Callable[[], float],
        spent: Callable[[], float],
        draining: Callable[[], bool],
    ) -> None:
        self._pages = pages
        self._now = now
        self._spent = spent
        self._draining = draining
        self._viewers: list[_Viewer] = []
        self._timer: asyncio.TimerHandle | None = None

    def serve(self, exchange: Exchange) -> None:
        """Begin a stream. Raise CapacityError if there are too many, RequestError 400 for an unknown page."""
        paths = self._wanted(exchange.request.query_fields.get("pages"))
        if exchange.request.method == "HEAD":
            exchange.respond(200, b"", EVENT_STREAM)
            return
        self._viewers = [each for each in self._viewers if each.exchange.open]
        if len(self._viewers) >= MOST_VIEWERS:
            raise CapacityError("Too many people look at the console.", code="no_capacity", retry_after_s=5.0)
        exchange.begin(b"retry: %d\n\n" % int(EVERY_S * 1000))
        viewer = _Viewer(exchange, self._now(), paths)
        self._viewers.append(viewer)
        if self._timer is None:
            self._set_timer(EVERY_S)
        self._show([viewer])

    def _wanted(self, asked: str | None) -> frozenset[str]:
        if asked is None:
            return frozenset(self._pages)
        wanted = frozenset(f"/{name}" for name in asked.split(","))
        if not wanted <= self._pages.keys():
            known = ", ".join(path.strip("/") for path in self._pages)
            raise RequestError(f"pages: a list of {known}, separated by commas.", param="pages")
        return wanted

    def _set_timer(self, after_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now, draining, began_s = self._now(), self._draining(), self._spent()
        for exchange, since_s, _ in self._viewers:
            if draining or now - since_s > STREAM_S:
                exchange.end(b"")
        self._viewers = [each for each in self._viewers if each.exchange.open]
        if self._viewers:
            self._show(self._viewers)
            pause_s = min(MOST_EVERY_S, max(EVERY_S, (self._spent() - began_s) / MOST_SHARE))
            self._set_timer(max(0.0, pause_s - (self._now() - now)))

    def _show(self, viewers: Sequence[_Viewer]) -> None:
        for path, page in self._pages.items():
            wanting = [each.exchange for each in viewers if path in each.paths]
            if not wanting:
                continue
            asked = InnerExchange("GET", path, b"", _sending(wanting, path.strip("/").encode()))
            try:
                page(asked)
            except KvasirError as error:
                asked.fail(error)
            # As in the gateway, an internal error must not end what serves the others.
            except Exception as error:
                log.exception("cannot render the page %s", path)
                asked.fail(error)


def _sending(viewers: Sequence[Exchange], name: bytes) -> Rendered:
    """Return what sends a page as an event of that name."""

    def send(status: int, body: bytes, content_type: bytes, headers: bytes) -> None:
        event = b"event: %b\ndata: %b\n\n" % (name, body.replace(b"\n", b"\ndata: "))
        for exchange in viewers:
            if not exchange.lagging:
                exchange.frame(event)

    return send
