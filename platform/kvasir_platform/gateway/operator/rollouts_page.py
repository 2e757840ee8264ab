"""Endpoints that show the rollouts of canaries, and order them."""

from __future__ import annotations

from urllib.parse import unquote

import msgspec

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.http.exchange import Exchange, LaterAnswers
from kvasir_platform.gateway.openai.schema.operation import RolloutsPage
from kvasir_platform.gateway.traffic.rollout import ACTIONS, Action
from kvasir_platform.gateway.traffic.rollouts import Rollouts

ROLLOUTS = "/rollouts"


class RolloutPages:
    """GET /rollouts, and POST /rollouts/{route}/{action}, whose response is the rollout after the order."""

    def __init__(self, rollouts: Rollouts | None) -> None:
        self._rollouts = rollouts
        self._later = LaterAnswers("rollout-page")

    def serve(self, exchange: Exchange) -> None:
        """Respond, to an order later. Raise RequestError for an unknown route or action."""
        request = exchange.request
        if request.path == ROLLOUTS:
            views = [] if self._rollouts is None else self._rollouts.views()
            exchange.respond(200, msgspec.json.encode(RolloutsPage(views)))
            return
        if self._rollouts is None:
            raise RequestError(
                "No route of this deployment has a canary; add one to routes in kvasir.yaml.",
                status=404,
                code="rollout_not_found",
            )
        name, _, asked = request.path.removeprefix(ROLLOUTS + "/").rpartition("/")
        action = next((each for each in ACTIONS if each == asked), None)
        if action is None:
            raise RequestError(
                f"{asked[:64]!r} is no order for a rollout; there are: {', '.join(ACTIONS)}.",
                status=404,
                code="not_found",
            )
        self._later.answer(exchange, _ordered(self._rollouts, unquote(name), action))


async def _ordered(rollouts: Rollouts, route: str, action: Action) -> bytes:
    return msgspec.json.encode(await rollouts.order(route, action))
