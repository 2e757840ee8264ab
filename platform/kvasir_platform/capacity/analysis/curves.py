"""The cost of a load by the SLO that it is to meet, for charts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvasir_platform.capacity.pools import ServiceTarget
from kvasir_platform.capacity.search import PlanRequest, SearchResult, search

FACTORS = (0.5, 0.75, 1.0, 1.5, 2.5)
CHEAPEST = "cheapest"


@dataclass(frozen=True, slots=True)
class CostLine:
    """The points of one kind of hardware alone, or of the cheapest plan: seconds of the SLO, dollars for an
    hour over a day. An SLO that no plan meets has no point."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Cost by one promise of the SLO, `ttft` or `itl`, with the other as it is. `asked_s` is what was asked
    for."""

    promise: str
    asked_s: float
    lines: tuple[CostLine, ...]


def cost_curves(result: SearchResult) -> tuple[CostCurve, ...]:
    """Return the curve for TTFT, and that for ITL unless requests are for embeddings."""
    promises = ("ttft",) if result.request.traffic.embeds else ("itl", "ttft")
    return tuple(_curve(result, promise) for promise in promises)


def _curve(result: SearchResult, promise: str) -> CostCurve:
    request = result.request
    asked = request.target.ttft_s if promise == "ttft" else request.target.itl_s
    points: dict[str, list[tuple[float, float]]] = {CHEAPEST: []}
    for factor in FACTORS:
        seconds = asked * factor
        found = result if factor == 1.0 else search(_with(request, promise, seconds))
        for name, dollars in _costs(found).items():
            points.setdefault(name, []).append((seconds, dollars))
    lines = (CostLine(name, tuple(at)) for name, at in points.items() if at)
    return CostCurve(promise, asked, tuple(lines))


def _with(request: PlanRequest, promise: str, seconds: float) -> PlanRequest:
    target = request.target
    changed = (
        ServiceTarget(seconds, target.itl_s, target.attainment)
        if promise == "ttft"
        else ServiceTarget(target.ttft_s, seconds, target.attainment)
    )
    return replace(request, target=changed)


def _costs(result: SearchResult) -> dict[str, float]:
    found: dict[str, float] = {}
    for plan in result.plans:
        if not plan.priced:
            continue
        dollars = plan.mean_dollars_per_hour
        found.setdefault(CHEAPEST, dollars)
        if len(set(plan.hardware)) == 1:
            found.setdefault(plan.hardware[0], dollars)
    return found
