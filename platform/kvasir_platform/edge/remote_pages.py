"""Pages of an edge about the whole deployment, rendered by the core, so that all edges return the same."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvasir_platform.edge.frames import PageRequest, PageResponse
from kvasir_platform.edge.remote_router import gone
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.serving.request_names import RequestNames

if TYPE_CHECKING:
    from kvasir_platform.edge.core_link import CoreLink


class RemotePages:
    """Responds to exchanges with pages of the core."""

    def __init__(self, link: CoreLink) -> None:
        self._link = link
        self._asked: dict[int, Exchange] = {}
        self._last = 0

    def show(self, exchange: Exchange) -> None:
        """Request a page of the core. Raise CapacityError if there is no core."""
        if self._link.lost:
            raise gone()
        self._last += 1
        number = self._last
        self._asked[number] = exchange
        exchange.on_gone = partial(self._forget, number)
        request = exchange.request
        self._link.say().asks.append(PageRequest(number, request.method, request.path, request.body))

    def heard(self, page: PageResponse) -> None:
        """Handle a response of the core."""
        exchange = self._asked.pop(page.number, None)
        if exchange is not None:
            exchange.respond(page.status, page.body, page.content_type, page.headers)

    def _forget(self, number: int, _code: str) -> None:
        self._asked.pop(number, None)

    def lost(self) -> None:
        """Handle the loss of the core."""
        waiting, self._asked = self._asked, {}
        for exchange in waiting.values():
            exchange.fail(gone())


class RemoteNames(RequestNames):
    """Registers the requests of a call with the core, since another edge may be asked for their routing
    decisions."""

    def __init__(self, link: CoreLink) -> None:
        super().__init__(0)
        self._link = link

    def note(self, client_id: str, names: tuple[str, ...]) -> None:
        """See RequestNames; the core stores it."""
        self._link.say().named.append((client_id, names))
