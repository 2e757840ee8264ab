"""Background responses: a call that goes on after its client has been answered.

The call runs on an exchange without a connection. Until it has passed all checks, an error is the answer to
its client; from then on the client polls.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from kvasir.ports.responses import ResponseStore, StoredResponse
from kvasir.telemetry.reasons import CLIENT_CLOSED
from kvasir_platform.gateway.http.exchange import JSON, Exchange
from kvasir_platform.gateway.http.inner_exchange import NoClient


class BackgroundExchange(Exchange):
    """The exchange of a background call of `client`, who gets what is answered first: by `accept`, or at the
    end of a call that was not accepted. `on_end` is called once, when it ends in any way."""

    __slots__ = ("_client", "_on_end")

    def __init__(self, client: Exchange, on_end: Callable[[], None]) -> None:
        super().__init__(client.request, client.request_id, client.arrival_s, NoClient(), client.errors)
        self.lines = client.lines
        self.key = client.key
        self._client = client
        self._on_end = on_end
        client.on_gone = self.gone

    def respond(self, status: int, body: bytes, content_type: bytes = JSON, headers: bytes = b"") -> None:
        """Answer the client, and end."""
        if self._open:
            self._client.lines = self.lines
            self._client.respond(status, body, content_type, headers)
            self.close()

    def accept(self, body: bytes) -> None:
        """Answer the client, and go on."""
        self._client.lines = self.lines
        self._client.respond(200, body)

    def close(self) -> None:
        """End; nothing is answered after it. Idempotent."""
        if self._open:
            self._shut()
            self.on_gone = None

    def _shut(self) -> None:
        super()._shut()
        self._on_end()


class BackgroundRun:
    """One background response of `tenant` with the id `name`. `running` counts those of each tenant; `items`
    are stored with it."""

    def __init__(
        self,
        client: Exchange,
        store: ResponseStore,
        running: Counter[str],
        *,
        tenant: str,
        name: str,
        items: bytes,
    ) -> None:
        running[tenant] += 1
        self.exchange = BackgroundExchange(client, self._uncount)
        self._store = store
        self._running = running
        self._stored = StoredResponse(tenant, name, b"", items, "running")

    def begun(self, body: bytes) -> None:
        """The call has passed all checks; `body` is its response so far. The router may still refuse it in
        this turn of the loop."""
        asyncio.get_running_loop().call_soon(self._accept, body)

    def ended(self, body: bytes) -> None:
        """The response has ended, maybe in the turn in which it began: then it is its client's answer."""
        self._store.put(replace(self._stored, body=body, status="ended"))
        self.exchange.respond(200, body)

    def _accept(self, body: bytes) -> None:
        if self.exchange.open:
            self._store.put(replace(self._stored, body=body), self._cancel)
            self.exchange.accept(body)

    def _cancel(self) -> None:
        self.exchange.gone(CLIENT_CLOSED)

    def _uncount(self) -> None:
        tenant = self._stored.tenant
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
