"""The endpoint that surveys the prefix index for the console."""

from __future__ import annotations

import msgspec

from kvasir.ports.router import RouterPort
from kvasir_platform.gateway.http.exchange import Exchange, LaterAnswers

PREFIXES = "/console/prefixes"
MOST_PREFIXES = 50


class PrefixPages:
    """GET of the largest shared prefixes. The survey gives way to other work, so it is answered later."""

    def __init__(self, router: RouterPort) -> None:
        self._router = router
        self._later = LaterAnswers("prefix-survey")

    def prefixes(self, exchange: Exchange) -> None:
        """Respond later."""
        self._later.answer(exchange, self._surveyed())

    async def _surveyed(self) -> bytes:
        return msgspec.json.encode({"models": await self._router.prefixes(MOST_PREFIXES)})
