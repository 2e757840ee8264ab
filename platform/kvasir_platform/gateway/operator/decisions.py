"""Routing decisions of a call, by the id in its response.

The router uses its own request ids, since a client may send one id twice and a call with several prompts is
several requests. The gateway keeps the mapping for as long as the router keeps the decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

import msgspec

from kvasir.core.errors import RequestError
from kvasir.ports.router import DecisionRecord, RequestSummary, RouterPort
from kvasir_platform.gateway.costs.ledger import CostLedger
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.openai.schema.answers import Decisions, ModelRegret, RegretPage
from kvasir_platform.gateway.openai.schema.operation import RequestTimeline
from kvasir_platform.gateway.operator.timelines import timeline_of
from kvasir_platform.gateway.serving.request_names import RequestNames

DECISIONS = "/decisions/"
REGRET = "/decisions"
_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")


class DecisionPages:
    """GET /decisions/{id}: one record and one timeline for each prompt of the call. GET /decisions: the
    regret of all. `ledger` is None if costs are not counted."""

    def __init__(self, router: RouterPort, names: RequestNames, ledger: CostLedger | None) -> None:
        self._router = router
        self._names = names
        self._ledger = ledger

    def decision(self, exchange: Exchange) -> None:
        """Accept the id of `x-request-id`, the `id` of the response, or the router's id. Raise RequestError
        404 if no decision is kept."""
        if exchange.request.path == REGRET:
            self._regret(exchange)
            return
        asked = unquote(exchange.request.path[len(DECISIONS) :])
        called = [asked, *(asked.removeprefix(each) for each in _ANSWER_PREFIXES if asked.startswith(each))]
        for names in map(self._names.find, called):
            found, timelines = self._records(names), self._timelines(names)
            if found or timelines:
                body = Decisions(asked, msgspec.to_builtins(found), timelines)
                exchange.respond(200, msgspec.json.encode(body))
                return
        raise RequestError(self._unknown(asked[:256]), status=404, code="decision_not_found")

    def _regret(self, exchange: Exchange) -> None:
        shown = {
            model: ModelRegret(view.judged, view.regretted, view.seconds, dict(view.causes))
            for model, view in self._router.regret().items()
        }
        exchange.respond(200, msgspec.json.encode(RegretPage(shown)))

    def _records(self, names: Sequence[str]) -> list[DecisionRecord]:
        explained = map(self._router.explain, names)
        return [record for record in explained if record is not None]

    def _timelines(self, names: Sequence[str]) -> list[RequestTimeline]:
        found = []
        for name in names:
            if (view := self._router.running_request(name)) is not None:
                found.append(timeline_of(view.so_far, view.phase, view.prompt_tokens, view.output_tokens))
            elif (summary := self._ended(name)) is not None:
                usage = summary.usage
                claims = None if self._ledger is None else self._ledger.claims_of(summary)
                found.append(timeline_of(summary, None, usage.prompt_tokens, usage.output_tokens, claims))
        return found

    def _ended(self, name: str) -> RequestSummary | None:
        rows = ((of_model, of_model.find(name)) for of_model in self._router.ended())
        return next((of_model[row] for of_model, row in rows if row is not None), None)

    def _unknown(self, asked: str) -> str:
        if not self._names.capacity:
            return "No decisions are kept here: routing.decision_records is 0 in kvasir.yaml; raise it."
        return (
            f"No decision is kept for {asked!r}. Kept are those in flight and the newest "
            f"{self._names.capacity} that ended (routing.decision_records in kvasir.yaml), of requests that "
            "reached a worker; the id is in the x-request-id header of the answer."
        )
