"""Which cell serves a request: the nearest one with capacity, unless another is expected to be better by a
margin.

A cell may serve a request if the tenant's data may be there, if it is known well enough, and if workers of
the model are ready. Of these, the ones with room for the request's KV are compared by the predicted TTFT,
network included, and by price. The prediction is the cell's own, from its last report: the wait of its queue,
what this cell has sent there since, and the time to compute the prompt without its cached part.

    ttft  = network + queue + sent / (rate * ready) + (prompt - cached) / rate
    score = ttft + price_s * dollars per million tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvasir.core.values import value
from kvasir_router.regions.reports import CellReport, ModelReport
from kvasir_router.regions.view import CellState, RegionView


class CellReason(StrEnum):
    """Why a cell serves a request, or none does.

    NEAREST: the nearest cell of all. FAILOVER: nearer ones are lost, or have no ready worker. SPILL_OVER:
    nearer ones have no room, or it answers sooner by the margin. PRICE: it is cheaper by more than the longer
    TTFT counts. RESIDENCY: the tenant's data may be in no cell that is listed. UNSERVED: no cell that may
    serve it has a ready worker of the model.
    """

    NEAREST = "nearest"
    FAILOVER = "failover"
    SPILL_OVER = "spill_over"
    PRICE = "price"
    RESIDENCY = "residency"
    UNSERVED = "unserved"


@dataclass(frozen=True, slots=True)
class ChoiceRules:
    """A farther cell is chosen if its score is lower by `margin_s`. `price_s` is how many seconds of TTFT it
    is worth to pay one dollar less for a million tokens; 0 ignores prices. A price counts only among cells
    whose predicted TTFT is within `promise_share` of the promised one."""

    margin_s: float = 0.1
    price_s: float = 0.0
    promise_share: float = 0.5

    def __post_init__(self) -> None:
        if min(self.margin_s, self.price_s) < 0 or not 0 < self.promise_share <= 1:
            raise ValueError("margin_s and price_s are not negative, and promise_share is in (0, 1]")


@dataclass(frozen=True, slots=True)
class CellRequest:
    """What a decision needs of a request. `residency` are the cells where the tenant's data may be, None for
    all. With a `revision`, only workers of that revision serve it, as the continuation of a stream needs.
    `cached` are leading tokens of the prompt that cells hold, by cell, and `avoid` are cells that were tried.
    `promised_s` is the TTFT of its SLO class. `needs` are features of a cell, with what they are in words."""

    model: str
    prompt_tokens: int
    output_tokens: int
    promised_s: float
    residency: frozenset[str] | None = None
    revision: str | None = None
    cached: Mapping[str, int] | None = None
    avoid: frozenset[str] = frozenset()
    needs: Mapping[str, str] | None = None


@value
class CellOffer:
    """A cell as a decision sees it. `network_s` is the round trip to it, `pending_tokens` are prompt tokens
    sent there that its report does not include. `why` says why it is not usable, "" if it is."""

    cell: str
    network_s: float
    state: CellState = CellState.FRESH
    report: ModelReport | None = None
    pending_tokens: int = 0
    draining: bool = False
    why: str = ""


@value
class CellCandidate:
    """A cell in a decision. Terms are in seconds, `total_s` is the predicted TTFT and `score_s` includes the
    price. `refused` says why it may not serve the request, "" if it may; `room`: its KV has room."""

    cell: str
    network_s: float
    queue_s: float = 0.0
    prefill_s: float = 0.0
    price_s: float = 0.0
    room: bool = False
    stale: bool = False
    refused: str = ""

    @property
    def total_s(self) -> float:
        """The predicted TTFT, network included."""
        return self.network_s + self.queue_s + self.prefill_s

    @property
    def score_s(self) -> float:
        """What candidates are compared by."""
        return self.total_s + self.price_s


@value
class CellChoice:
    """A decision with its reasons. `cell` is None if no cell can serve the request; `order` are the cells to
    try, `cell` first. `candidates` are all cells, the nearest first."""

    cell: str | None
    reason: CellReason
    order: tuple[str, ...]
    candidates: tuple[CellCandidate, ...]


def offers_of(
    view: RegionView,
    own: CellReport,
    request: CellRequest,
    network_s: Mapping[str, float],
    now: float,
) -> list[CellOffer]:
    """Return the offers of this cell, whose own report is always fresh, and of those in `view`. `network_s`
    are round trips by cell; a cell without one is not offered."""
    found = [CellOffer(own.cell, 0.0, report=_served(own, request), draining=own.draining)]
    for cell in view.cells:
        distance_s = network_s.get(cell)
        if distance_s is None or cell == own.cell:
            continue
        state, report = view.state(cell, now), view.report(cell)
        if report is None or not state.usable:
            found.append(CellOffer(cell, distance_s, state, why=view.reason(cell, now)))
            continue
        served = _served(report, request)
        pending = view.pending_tokens(cell, served) if served is not None else 0
        found.append(CellOffer(cell, distance_s, state, served, pending, report.draining))
    return found


def _served(report: CellReport, request: CellRequest) -> ModelReport | None:
    """Return the report of the request's model: of the revision that most workers have, if any will do."""
    best = None
    for each in report.models:
        if each.model != request.model or request.revision not in (None, each.revision):
            continue
        if request.needs and not request.needs.keys() <= set(each.features):
            continue
        if best is None or each.ready > best.ready:
            best = each
    return best


def choose(request: CellRequest, offers: Sequence[CellOffer], rules: ChoiceRules) -> CellChoice:
    """Return which cell serves a request. Takes time in proportion to the number of cells."""
    near = sorted(offers, key=lambda offer: (offer.network_s, offer.cell))
    candidates = tuple(_candidate(request, offer, rules) for offer in near)
    allowed = [each for each in candidates if not each.refused]
    if not allowed:
        outside = all(_outside(request, each.cell) for each in candidates)
        return CellChoice(None, CellReason.RESIDENCY if outside else CellReason.UNSERVED, (), candidates)
    capable = _capable(allowed)
    nearest = capable[0]
    best = _best(request, capable, rules)
    others = sorted((each for each in allowed if each is not best), key=_by_total)
    order = (best.cell, *(each.cell for each in others))
    return CellChoice(best.cell, _reason(request, candidates, nearest, best), order, candidates)


def _candidate(request: CellRequest, offer: CellOffer, rules: ChoiceRules) -> CellCandidate:
    report = offer.report
    refused = _refusal(request, offer)
    if refused or report is None:
        return CellCandidate(offer.cell, offer.network_s, refused=refused)
    rate = report.prefill_tokens_per_s
    cached = request.cached.get(offer.cell, 0) if request.cached else 0
    fresh = max(1, request.prompt_tokens - cached)
    return CellCandidate(
        offer.cell,
        offer.network_s,
        queue_s=report.queue_s + (offer.pending_tokens / (rate * report.ready) if rate else 0.0),
        prefill_s=fresh / rate if rate else 0.0,
        price_s=rules.price_s * report.dollars_per_mtok,
        room=report.kv_free_tokens >= request.prompt_tokens + request.output_tokens,
        stale=offer.state is CellState.STALE,
    )


def _outside(request: CellRequest, cell: str) -> bool:
    return request.residency is not None and cell not in request.residency


def _refusal(request: CellRequest, offer: CellOffer) -> str:
    """Return why a cell may not serve a request, "" if it may."""
    if _outside(request, offer.cell):
        return "the tenant's data may not be there"
    if offer.cell in request.avoid:
        return "it was tried"
    if not offer.state.usable:
        return f"{offer.state}: {offer.why}" if offer.why else str(offer.state)
    if offer.draining:
        return "it is draining"
    if offer.report is None:
        revision = f" at revision {request.revision}" if request.revision else ""
        needs = f" with {', '.join(request.needs.values())}" if request.needs else ""
        return f"it does not serve {request.model}{revision}{needs}"
    return "" if offer.report.ready else "no worker is ready"


def _capable(allowed: Sequence[CellCandidate]) -> list[CellCandidate]:
    """Return the candidates to compare: fresh ones with room, else fresh ones, where the request waits for
    room, else those whose reports are stale."""
    fresh = [each for each in allowed if not each.stale]
    return [each for each in fresh if each.room] or fresh or list(allowed)


def _best(request: CellRequest, capable: Sequence[CellCandidate], rules: ChoiceRules) -> CellCandidate:
    """Return the nearest, or the one with the best score if that is better by the margin."""
    nearest, in_time = capable[0], _in_time(request, capable, rules)
    if not in_time:
        best = min(capable, key=_by_total)
    else:
        best = min(in_time, key=lambda each: (each.score_s, each.network_s, each.cell))
    # A cell that keeps its promise is compared by price with cells that do so as well.
    by_score = bool(in_time) and nearest is in_time[0]
    gain_s = nearest.score_s - best.score_s if by_score else nearest.total_s - best.total_s
    return best if gain_s > rules.margin_s else nearest


def _in_time(
    request: CellRequest, capable: Sequence[CellCandidate], rules: ChoiceRules
) -> list[CellCandidate]:
    return [each for each in capable if each.total_s <= rules.promise_share * request.promised_s]


def _by_total(candidate: CellCandidate) -> tuple[bool, bool, float, str]:
    """Order in which cells are tried: fresh ones, with room, by predicted TTFT."""
    return candidate.stale, not candidate.room, candidate.total_s, candidate.cell


def _reason(
    request: CellRequest,
    candidates: Sequence[CellCandidate],
    nearest: CellCandidate,
    best: CellCandidate,
) -> CellReason:
    if best is nearest:
        nearer = [
            each
            for each in candidates
            if each.network_s < best.network_s and not _outside(request, each.cell)
        ]
        if not nearer:
            return CellReason.NEAREST
        return CellReason.SPILL_OVER if any(not each.refused for each in nearer) else CellReason.FAILOVER
    return CellReason.SPILL_OVER if best.total_s < nearest.total_s else CellReason.PRICE
