"""The endpoint that surveys the prefix index for the console."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kvasir.ports.router import RouterPort
from kvasir_platform.gateway.http.exchange import Exchange

PREFIXES = "/console/prefixes"
MOST_PREFIXES = 50

log = logging.getLogger(__name__)


class PrefixPages:
    """GET of the largest shared prefixes. The survey gives way to other work, so it is answered later."""

    def __init__(self, router: RouterPort) -> None:
        self._router = router
        self._running: set[asyncio.Task[None]] = set()

    def prefixes(self, exchange: Exchange) -> None:
        """Respond later."""
        task = asyncio.get_running_loop().create_task(self._respond(exchange), name="prefix-survey")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _respond(self, exchange: Exchange) -> None:
        try:
            found = await self._router.prefixes(MOST_PREFIXES)
        # As in the gateway, an internal error must still produce a response.
        except Exception as error:
            log.exception("the prefix index cannot be surveyed")
            exchange.fail(error)
        else:
            exchange.respond(200, msgspec.json.encode({"models": found}))
