"""Stored responses kept by the core for all its edges, at both ends of a link: a client that asks later may
reach another edge."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from kvasir.ports.responses import ResponseStore, StoredResponse
from kvasir_platform.edge.frames import MAX_FRAME_BYTES, ResponseAsked, ResponseFound, ResponseKept
from kvasir_platform.edge.remote_router import gone

if TYPE_CHECKING:
    from kvasir_platform.edge.core_link import CoreLink

log = logging.getLogger(__name__)

MAX_RESPONSE_BYTES = MAX_FRAME_BYTES // 2
"""A larger response is not stored: it would not fit a frame of the link."""


class RemoteResponses:
    """`kvasir.ports.responses.ResponseStore` over a link."""

    def __init__(self, link: CoreLink) -> None:
        self._link = link
        self._asked: dict[int, Callable[[StoredResponse | None], None]] = {}
        self._running: dict[str, Callable[[], None]] = {}
        self._last = 0

    def put(self, response: StoredResponse, on_cancel: Callable[[], None] | None = None) -> None:
        """See the port. Nothing is stored while the core is lost or does not read."""
        if on_cancel is None:
            self._running.pop(response.id, None)
        if self._link.lost or self._link.full or response.size > MAX_RESPONSE_BYTES:
            return
        if on_cancel is not None:
            self._running[response.id] = on_cancel
        self._link.say().kept.append(ResponseKept(response))

    def find(self, tenant: str, name: str, then: Callable[[StoredResponse | None], None]) -> None:
        """See the port."""
        self._ask("find", tenant, name, then)

    def cancel(self, tenant: str, name: str, then: Callable[[StoredResponse | None], None]) -> None:
        """See the port."""
        self._ask("cancel", tenant, name, then)

    def remove(self, tenant: str, name: str, then: Callable[[StoredResponse | None], None]) -> None:
        """See the port."""
        self._ask("remove", tenant, name, then)

    def heard(self, found: ResponseFound) -> None:
        """Handle a response of the core."""
        then = self._asked.pop(found.number, None)
        if then is None:
            return
        try:
            then(found.response)
        except Exception:  # one request's fault must not end the link that serves the others
            log.exception("a request failed after its stored response was found")

    def stopped(self, name: str) -> None:
        """A running response was cancelled or removed, here or at another edge."""
        stop = self._running.pop(name, None)
        if stop is not None:
            stop()

    def lost(self) -> None:
        """Handle the loss of the core."""
        self._running.clear()
        waiting, self._asked = self._asked, {}
        for then in waiting.values():
            then(None)

    def _ask(
        self,
        act: Literal["find", "cancel", "remove"],
        tenant: str,
        name: str,
        then: Callable[[StoredResponse | None], None],
    ) -> None:
        if self._link.lost:
            raise gone()
        self._last += 1
        self._asked[self._last] = then
        self._link.say().responses.append(ResponseAsked(self._last, act, tenant, name))


class EdgeResponses:
    """The responses of one edge in `store`. `found` sends an answer to the edge, `stop` the id of a running
    response that was cancelled."""

    def __init__(
        self, store: ResponseStore, *, found: Callable[[ResponseFound], None], stop: Callable[[str], None]
    ) -> None:
        self._store = store
        self._found = found
        self._stop = stop
        self._running: dict[str, StoredResponse] = {}

    def keep(self, response: StoredResponse) -> None:
        """Store a response of the edge."""
        if response.status == "running":
            self._running[response.id] = response
            self._store.put(response, partial(self._stopped, response.id))
        else:
            self._running.pop(response.id, None)
            self._store.put(response)

    def ask(self, asked: ResponseAsked) -> None:
        """Do what the edge asks for, and answer it."""
        acts = {"find": self._store.find, "cancel": self._store.cancel, "remove": self._store.remove}
        act = acts[asked.act]
        act(asked.tenant, asked.name, partial(self._answer, asked.number))

    def lost(self) -> None:
        """The edge has ended: what it ran is lost."""
        running, self._running = self._running, {}
        for response in running.values():
            self._store.put(replace(response, status="lost"))

    def _answer(self, number: int, response: StoredResponse | None) -> None:
        if response is not None and response.size > MAX_RESPONSE_BYTES:
            response = None
        self._found(ResponseFound(number, response))

    def _stopped(self, name: str) -> None:
        if self._running.pop(name, None) is not None:
            self._stop(name)
