"""The load of each model, put together from what all routers tell, and how far that can be trusted.

Routers come and go, and each counts for itself. One that is silent for a moment is a reason to leave
everything as it is: its part of the load is not known. One that is silent for long is gone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvasir.core.demand import DemandReport, Traffic, WorkerStats

FORGET_S = 60.0
"""A router that has been silent for so long has ended."""
MOST_ROUTERS = 256


@dataclass(slots=True)
class _Router:
    report: DemandReport
    at_s: float
    counted: dict[str, Traffic] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Interval:
    """What came between two readings, `seconds` apart, of one model."""

    seconds: float
    traffic: Traffic


class Demand:
    """Takes reports, and tells intervals. `stale_s`: a router that was silent for longer is missed."""

    def __init__(self, stale_s: float) -> None:
        self._stale_s = stale_s
        self._routers: dict[str, _Router] = {}
        self._read_s: float | None = None
        self._reported = False

    def take(self, report: DemandReport, now: float) -> bool:
        """A router's word; False for one that is older than what is known, or from one router too many."""
        known = self._routers.get(report.router_id)
        if known is None:
            if len(self._routers) >= MOST_ROUTERS:
                return False
            # What it counted before it was first heard is not of any interval.
            self._routers[report.router_id] = _Router(report, now, dict(report.models))
            self._reported = True
            return True
        if report.sequence <= known.report.sequence:
            return False
        known.report, known.at_s, self._reported = report, now, True
        return True

    def missing(self, now: float) -> str | None:
        """Why the load is not known, in words; None where it is."""
        for name in [name for name, each in self._routers.items() if now - each.at_s > FORGET_S]:
            del self._routers[name]
        if not self._routers:
            return "no router has told anything yet"
        silent = {name: now - each.at_s for name, each in self._routers.items()}
        name, seconds = max(silent.items(), key=lambda item: item[1])
        return f"{name} has said nothing for {seconds:.0f} s" if seconds > self._stale_s else None

    @property
    def reported(self) -> bool:
        """Whether any router has said anything since the last reading: if not, nothing having come says
        nothing."""
        return self._reported

    def asking(self) -> Mapping[str, int]:
        """Requests that wait because no worker serves them at all, and those that have come since the last
        reading, by model: where a start takes longer than they may wait, they were turned away."""
        found: dict[str, int] = {}
        for each in self._routers.values():
            for model, traffic in each.report.models.items():
                arrived = traffic.since(each.counted.get(model, Traffic())).arrived
                found[model] = found.get(model, 0) + traffic.parked + arrived
        return found

    def read(self, now: float) -> Mapping[str, Interval]:
        """What came since the last reading, by model; nothing at the first."""
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
        """Every worker that a router knows, as the one that was heard last sees it."""
        found: dict[str, WorkerStats] = {}
        for each in sorted(self._routers.values(), key=lambda router: router.at_s):
            found.update({worker.worker_id: worker for worker in each.report.workers})
        return found


MIX_S = 300.0
"""Over so many seconds of traffic the mix of requests is averaged."""


@dataclass(slots=True)
class Mix:
    """What requests of a model are like, averaged with weights that fade."""

    _weight: float = 0.0
    _prompt: float = 0.0
    _computed: float = 0.0
    _squares: float = 0.0
    _output: float = 0.0

    def take(self, interval: Interval) -> None:
        """Learn from what ended."""
        news = interval.traffic
        fade = math.exp(-interval.seconds / MIX_S)
        # While nothing ends, what is known stays known.
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
        """Of a request."""
        return self._prompt / self._weight if self.known else 0.0

    @property
    def computed_tokens(self) -> float:
        """Of a request's prompt, in no cache."""
        return self._computed / self._weight if self.known else 0.0

    @property
    def computed_share(self) -> float:
        """Of all prompt tokens; all of them while nothing is known."""
        return self._computed / self._prompt if self._prompt else 1.0

    @property
    def output_tokens(self) -> float:
        """Of a request's answer."""
        return self._output / self._weight if self.known else 0.0

    @property
    def unevenness(self) -> float:
        """The squared coefficient of variation of what prompts cost."""
        mean = self.computed_tokens
        return max(0.0, self._squares / self._weight / mean**2 - 1.0) if mean else 0.0
