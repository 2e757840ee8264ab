"""The load of each model, combined from the reports of all routers, and whether it can be trusted.

Routers come and go, and each counts its own requests. While a router is briefly silent, sizes do not change,
because its part of the load is unknown. A router that is silent for long has ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvasir.core.demand import DemandReport, Traffic, WorkerStats

FORGET_S = 60.0
"""Seconds of silence after which a router has ended."""
MOST_ROUTERS = 256


@dataclass(slots=True)
class _Router:
    report: DemandReport
    at_s: float
    counted: dict[str, Traffic] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Interval:
    """The load of one model between two readings, `seconds` apart."""

    seconds: float
    traffic: Traffic


class Demand:
    """Combines reports into load samples. `stale_s`: a router that is silent for longer makes the load
    unknown."""

    def __init__(self, stale_s: float) -> None:
        self._stale_s = stale_s
        self._routers: dict[str, _Router] = {}
        self._read_s: float | None = None
        self._reported = False

    def take(self, report: DemandReport, now: float) -> bool:
        """Take a router's report. Return False for an outdated one, and for one from too many routers."""
        known = self._routers.get(report.router_id)
        if known is None:
            if len(self._routers) >= MOST_ROUTERS:
                return False
            # Counts from before its first report belong to no interval.
            self._routers[report.router_id] = _Router(report, now, dict(report.models))
            self._reported = True
            return True
        if report.sequence <= known.report.sequence:
            return False
        known.report, known.at_s, self._reported = report, now, True
        return True

    def missing(self, now: float) -> str | None:
        """Return why the load is unknown; None if it is known."""
        for name in [name for name, each in self._routers.items() if now - each.at_s > FORGET_S]:
            del self._routers[name]
        if not self._routers:
            return "no router has reported yet"
        silent = {name: now - each.at_s for name, each in self._routers.items()}
        name, seconds = max(silent.items(), key=lambda item: item[1])
        return f"no report from {name} for {seconds:.0f} s" if seconds > self._stale_s else None

    @property
    def reported(self) -> bool:
        """Whether any router has reported since the last reading; if not, a count of zero means nothing."""
        return self._reported

    def asking(self) -> Mapping[str, int]:
        """Return by model the requests that wait because no worker serves them, plus those that arrived since
        the last reading: if a start takes longer than they may wait, they were refused."""
        found: dict[str, int] = {}
        for each in self._routers.values():
            for model, traffic in each.report.models.items():
                arrived = traffic.since(each.counted.get(model, Traffic())).arrived
                found[model] = found.get(model, 0) + traffic.parked + arrived
        return found

    def read(self, now: float) -> Mapping[str, Interval]:
        """Return the load since the last reading, by model; empty at the first."""
        seconds = 0.0 if self._read_s is None else now - self._read_s
        self._read_s, self._reported = now, False
        found: dict[str, Traffic] = {}
        for each in self._routers.values():
            for model, traffic in each.report.models.items():
                news = traffic.since(each.counted.get(model, Traffic()))
                found[model] = found[model].plus(news) if model in found else news
            each.counted = dict(each.report.models)
        return {} if seconds <= 0.0 else {name: Interval(seconds, news) for name, news in found.items()}

    def workers(self) -> dict[str, WorkerStats]:
        """Return every worker that a router knows, from the latest report that has it."""
        found: dict[str, WorkerStats] = {}
        for each in sorted(self._routers.values(), key=lambda router: router.at_s):
            found.update({worker.worker_id: worker for worker in each.report.workers})
        return found


MIX_S = 300.0
"""Seconds of traffic over which the mix of requests is averaged."""


@dataclass(slots=True)
class Mix:
    """The average request of a model, with exponentially decaying weights."""

    _weight: float = 0.0
    _prompt: float = 0.0
    _computed: float = 0.0
    _squares: float = 0.0
    _output: float = 0.0

    def take(self, interval: Interval) -> None:
        """Update from ended requests."""
        news = interval.traffic
        fade = math.exp(-interval.seconds / MIX_S)
        # Without ended requests, the averages do not decay.
        if news.ended == 0:
            return
        self._weight = self._weight * fade + news.ended
        self._prompt = self._prompt * fade + news.prompt_tokens
        self._computed = self._computed * fade + news.computed_tokens
        self._squares = self._squares * fade + news.computed_squares
        self._output = self._output * fade + news.output_tokens

    @property
    def known(self) -> bool:
        """Whether any request has ended."""
        return self._weight > 0.0

    @property
    def prompt_tokens(self) -> float:
        """Prompt tokens of a request."""
        return self._prompt / self._weight if self.known else 0.0

    @property
    def computed_tokens(self) -> float:
        """Prompt tokens of a request that are in no cache."""
        return self._computed / self._weight if self.known else 0.0

    @property
    def computed_share(self) -> float:
        """Uncached share of all prompt tokens; 1 while unknown."""
        return self._computed / self._prompt if self._prompt else 1.0

    @property
    def output_tokens(self) -> float:
        """Output tokens of a request."""
        return self._output / self._weight if self.known else 0.0

    @property
    def unevenness(self) -> float:
        """Squared coefficient of variation of the cost of prompts."""
        mean = self.computed_tokens
        return max(0.0, self._squares / self._weight / mean**2 - 1.0) if mean else 0.0
