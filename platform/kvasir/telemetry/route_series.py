"""Metric families of routes and their arms, and of rollouts, which are read at scrape time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvasir.core.requests import RouteArm
from kvasir.ports.router import RequestSummary
from kvasir.telemetry.families.scraped import SeriesTable, by_name, gauge
from kvasir.telemetry.families.updated import CounterFamily, HistogramFamily
from kvasir.telemetry.reasons import outcome_label


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """The figures of one rollout. `evidence` is the natural logarithm of the evidence that the canary is
    worse, by criterion."""

    share: float
    evidence: Mapping[str, float] = field(default_factory=dict)
    stale_s: float = 0.0


ROLLOUTS: SeriesTable[Mapping[str, RolloutStats]] = SeriesTable(
    "kvasir_rollout_",
    ("route",),
    by_name,
    gauge("share", "Share of the route's requests that the canary gets", "share"),
    gauge(
        "evidence", "Natural logarithm of the evidence that the canary is worse", "evidence", by="criterion"
    ),
    gauge("stale_seconds", "Seconds since the shared state of rollouts was read", "stale_s"),
)

_ARM = ("route", "arm")
_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)


class RouteSeries:
    """The families by route and arm. `counter` and `histogram` register a family. Labels are names in the
    spec, so that their number is bounded."""

    def __init__(
        self,
        counter: Callable[..., CounterFamily],
        histogram: Callable[[str, str, tuple[float, ...], tuple[str, ...]], HistogramFamily],
    ) -> None:
        text = "Requests of a route ended, by arm and outcome"
        self._requests = counter("route_requests", text, *_ARM, "outcome")
        text = "Requests of a route ended, by arm and whether their SLO class was met"
        self._slo = counter("route_slo_requests", text, *_ARM, "met")
        text = "Requests of a route that another model took over from an arm"
        self._fallbacks = counter("route_fallbacks", text, *_ARM)
        text = "Copies of requests for the shadow of a route, by outcome"
        self._shadows = counter("shadow_requests", text, *_ARM, "outcome")
        text = "Time from request received to first token, by route and arm"
        self._ttft = histogram("route_time_to_first_token_seconds", text, _TTFT, _ARM)
        text = "Mean time per output token after the first, by route and arm"
        self._tpot = histogram("route_time_per_output_token_seconds", text, _TPOT, _ARM)

    def finished(self, summary: RequestSummary, arm: RouteArm) -> None:
        """Count a request of an arm that has ended."""
        self._requests.add((*arm, outcome_label(summary.outcome)))
        if (met := summary.slo_met) is not None:
            self._slo.add((*arm, "yes" if met else "no"))
        self._times(summary, arm)

    def fell_back(self, given_up: RouteArm) -> None:
        """Count a request that another model takes over."""
        self._fallbacks.add(tuple(given_up))

    def shadowed(self, arm: RouteArm, outcome: str, summary: RequestSummary | None) -> None:
        """Count a copy; `summary` is that of one that has ended."""
        self._shadows.add((*arm, outcome))
        if summary is not None:
            self._times(summary, arm)

    def _times(self, summary: RequestSummary, arm: RouteArm) -> None:
        if (ttft := summary.ttft_s) is not None:
            self._ttft.labels(*arm).observe(ttft)
        if (itl := summary.itl_s) is not None:
            self._tpot.labels(*arm).observe(itl)
