"""The exchange of one line of a batch: its answer is a result to store, and goes to no client."""

from __future__ import annotations

from collections.abc import Callable

from kvasir_platform.gateway.http.exchange import JSON, Exchange, HttpRequest
from kvasir_platform.gateway.http.inner_exchange import NoClient


class LineExchange(Exchange):
    """Calls `done` once, when it is answered with `status` and `answer`. `error` is why it failed, None where
    it did not. It may be answered from within the router, so `done` only takes note."""

    __slots__ = ("_done", "answer", "custom_id", "error", "number", "status")

    def __init__(
        self,
        path: str,
        body: bytes,
        *,
        request_id: str,
        now: float,
        number: int,
        custom_id: str,
        done: Callable[[LineExchange], None],
    ) -> None:
        headers = {b"content-type": JSON}
        request = HttpRequest("POST", path, headers, body, keep_alive=True, chunked=False)
        super().__init__(request, request_id, now, NoClient())
        self.number = number
        self.custom_id = custom_id
        self.status = 0
        self.answer = b""
        self.error: Exception | None = None
        self._done = done

    def respond(self, status: int, body: bytes, content_type: bytes = JSON, headers: bytes = b"") -> None:
        """Take the answer."""
        if self._open:
            self.status, self.answer = status, body
            self._shut()
            self.on_gone = None
            self._done(self)

    def fail(self, error: Exception) -> None:
        """Take the error, and its body as the answer."""
        self.error = error
        super().fail(error)
