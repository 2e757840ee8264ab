"""An exchange inside the process: pages are rendered for a caller that is no connection."""

from __future__ import annotations

from collections.abc import Callable

from kvasir.native import StreamGaps
from kvasir_platform.gateway.http.exchange import JSON, Exchange, HttpRequest

Rendered = Callable[[int, bytes, bytes, bytes], None]
"""Takes status, body, content type and header lines of a response."""


class InnerExchange(Exchange):
    """A request for a page, whose whole response is passed to `then`, once."""

    __slots__ = ("_then",)

    def __init__(self, method: str, path: str, body: bytes, then: Rendered) -> None:
        request = HttpRequest(method, path, {}, body, keep_alive=True, chunked=True)
        super().__init__(request, "", 0.0, NoClient())
        self._then = then

    def respond(self, status: int, body: bytes, content_type: bytes = JSON, headers: bytes = b"") -> None:
        """Pass on the response."""
        if self._open:
            self._open = False
            self._then(status, body, content_type, headers)


class NoClient:
    """An ExchangeWire without a client."""

    lagging = False

    def write(self, data: bytes) -> None:
        """There is no client."""

    def lane(self, before: bytes, after: bytes, *, chunked: bool, gaps: StreamGaps) -> None:
        """None: nothing streams to it."""

    def answered(self, *, close: bool) -> None:
        """There is no connection to close."""

    def date(self) -> bytes:
        """The listener adds its own."""
        return b""
