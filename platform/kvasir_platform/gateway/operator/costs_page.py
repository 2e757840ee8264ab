"""The endpoint that says what requests cost, for `kvasir cost` and the console."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kvasir.core.errors import RequestError
from kvasir.ports.stores.costs import DAY_S, HOUR_S
from kvasir_platform.gateway.costs.budgets import BudgetState
from kvasir_platform.gateway.costs.keeper import CostKeeper
from kvasir_platform.gateway.costs.statement import CostStatement, StatementLine
from kvasir_platform.gateway.http.exchange import Exchange, LaterAnswers
from kvasir_platform.gateway.openai.schema.costs import (
    BudgetShown,
    CostsAsked,
    CostsLine,
    CostsPage,
    CostsViewed,
)

Asked = TypeVar("Asked", CostsAsked, CostsViewed)

COSTS = "/costs"
MOST_LINES = 20_000
_DAYS = 7
_UNCOUNTED = msgspec.json.encode(
    CostsPage("", 0, 0, [], [], 0.0, 0.0, 0.0, [], [], stored=True, counted=False)
)


class CostPages:
    """POST /costs, and a GET with CostsViewed as its body for the console. `costs` is None if they are not
    counted. Answers come later, since they are read from a store."""

    def __init__(self, costs: CostKeeper | None, wall: Callable[[], float] = time.time) -> None:
        self._costs = costs
        self._wall = wall
        self._later = LaterAnswers("costs")

    def costs(self, exchange: Exchange) -> None:
        """Respond later. Raise RequestError for an invalid question, or if costs are not counted."""
        costs, console = self._costs, exchange.request.method == "GET"
        if costs is None and console:
            exchange.respond(200, _UNCOUNTED)
            return
        if costs is None:
            raise RequestError(
                "Costs are not counted: cost.enabled is false in kvasir.yaml.",
                status=404,
                code="costs_disabled",
            )
        now, body = self._wall(), exchange.request.body
        asked = _viewed(costs, now, body) if console else _decoded(body, CostsAsked)
        until = now if asked.until is None else asked.until
        since = until - _DAYS * DAY_S if asked.since is None else asked.since
        if not now - costs.retention_s - DAY_S <= since < until <= now + HOUR_S:
            days = costs.retention_s // DAY_S
            raise RequestError(
                f"since and until: send Unix times in order, of the last {days} days.",
                code="invalid_value",
                param="since",
            )
        self._later.answer(exchange, _answer(costs, int(since), int(until), asked.by))


async def _answer(costs: CostKeeper, since: int, until: int, by: Sequence[str]) -> bytes:
    found = await costs.statement(since, until, by)
    if len(found.lines) > MOST_LINES:
        raise RequestError(
            f"There are {len(found.lines)} lines, and at most {MOST_LINES} are sent: ask for fewer "
            "days or dimensions.",
            code="invalid_value",
            param="by",
        )
    return msgspec.json.encode(_page(costs, found, since, until, by))


def _viewed(costs: CostKeeper, now: float, body: bytes) -> CostsAsked:
    """Return what to ask for, within the hours that are kept."""
    viewed = _decoded(body, CostsViewed)
    since = now - min(viewed.days * DAY_S, costs.retention_s)
    return CostsAsked(since=since, by=("day", viewed.by))


def _decoded(body: bytes, kind: type[Asked]) -> Asked:
    """Raise RequestError that names the field."""
    try:
        asked = msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"The body is invalid: {error}.", code="invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    return asked


def _page(costs: CostKeeper, found: CostStatement, since: int, until: int, by: Sequence[str]) -> CostsPage:
    states = [] if costs.budgets is None else costs.budgets.states()
    return CostsPage(
        currency=costs.currency,
        since=since // HOUR_S * HOUR_S,
        until=until,
        by=list(by),
        lines=[_line(line) for line in found.lines],
        device_seconds=round(found.device_s, 3),
        gpu_hours=round(found.gpu_s / HOUR_S, 6),
        cost=round(found.cost, 9),
        budgets=[_budget(state) for state in states],
        unpriced=sorted(costs.ledger.unpriced),
        stored=costs.stored,
    )


def _line(line: StatementLine) -> CostsLine:
    return CostsLine(
        line.kind,
        line.names,
        line.requests,
        line.prompt_tokens,
        line.cached_tokens,
        line.output_tokens,
        round(line.prefill_s, 3),
        round(line.decode_s, 3),
        round(line.kv_s, 3),
        round(line.transfer_s, 3),
        round(line.seconds, 3),
        round(line.cost, 9),
    )


def _budget(state: BudgetState) -> BudgetShown:
    budget, period = state.budget, state.period
    return BudgetShown(
        state.tenant, period.name, round(state.spent, 6), budget.soft, budget.hard, float(period.end_s)
    )
