"""Chooses predictor and margin of a forecast by a backtest on the observed load.

A forecast is multiplied by a margin, and the right margin depends on the load: 1 where it changes slowly, 1.5
where bursts arrive at once. So for every predictor and every margin, a simulated fleet is sized by them
throughout. The observed load passes through each fleet as a fluid: replicas take their time to start, excess
load waits, and requests that wait for longer than the SLO allows have missed it. The choice is the pair that
kept the SLO over the last day with the fewest replicas.

This is follow-the-leader on simulated costs (Kalai and Vempala, 2005) with the SLO as a constraint. Real
misses correct for what the fluid model leaves out: they are subtracted from the allowed misses.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvasir_platform.planner.stabilize import DesiredWindow, Many, Which

MARGINS = (0.96, 1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.4, 1.5, 1.6, 1.75, 2.0)
_REMEMBERED_S = 86_400.0
_USUAL_S = 7200.0
"""Seconds over which the usual load is averaged."""
_GRACE_S = 3600.0
"""Seconds of usual load that are assumed to have been served well before the start."""
_UNPROVEN_S = 34_000.0
"""Seconds, less the grace, in which a margin of 1 must have sufficed before it is trusted; proportionally
less for larger margins, up to `_SAFE`, which is trusted at once."""
_SAFE = 1.6
_LEAST_ALLOWED = 0.1
"""Minimum share of the allowed misses that remains after real misses have exceeded them."""
PRESSING = 0.4
"""Share of the slack beyond which waiting work is worked off by extra replicas."""


@dataclass(slots=True)
class SloLedger:
    """Requests and SLO misses of the last day. `aim` is the share of requests that may miss."""

    aim: float
    _judged: float = 0.0
    _missed: float = 0.0

    def take(self, judged: int, missed: int, seconds: float) -> None:
        """Count `judged` ended requests, of which `missed` missed what a larger pool would have achieved."""
        fade = math.exp(-seconds / _REMEMBERED_S)
        self._judged = fade * self._judged + judged
        self._missed = fade * self._missed + missed

    @property
    def overdrawn(self) -> float:
        """Number of misses beyond the aim."""
        return max(0.0, self._missed - self.aim * self._judged)


@dataclass(frozen=True, slots=True)
class ForecastChoice:
    """The choice for one role: predictor, margin, and how surplus replicas are kept."""

    predictor: int
    margin: float
    calm: bool


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The load of the last `seconds`. `load` and the `predicted` loads, by predictor, are in busy replicas;
    `requests` is a count. `spare` replicas are added to every size, a start takes `start_s`, a request may
    wait for `slack_s`, and desired sizes are remembered for `over_s`."""

    seconds: float
    load: float
    predicted: Sequence[float]
    requests: float
    spare: float
    start_s: float
    slack_s: float
    over_s: float


@dataclass(slots=True)
class Backtest:
    """The backtest of one role: a simulated fleet for each of `predictors`, each margin, and both ways of
    keeping replicas. `part` is this role's share of the misses that the ledger's aim allows."""

    predictors: int
    ledger: SloLedger
    part: float
    _window: DesiredWindow = field(default_factory=DesiredWindow)
    _starting: deque[tuple[float, Many]] = field(default_factory=deque)
    _margins: Many = field(init=False)
    _calm: Which = field(init=False)
    _serving: Many = field(init=False)
    _backlog: Many = field(init=False)
    _paid: Many = field(init=False)
    _missed: Many = field(init=False)
    _requests: float = 0.0
    _usual: float = 0.0
    _played_s: float = 0.0

    def __post_init__(self) -> None:
        # Columns: not calm and calm; within them by predictor; within those by margin.
        self._margins = np.tile(np.array(MARGINS), 2 * self.predictors)
        self._calm = np.arange(len(self._margins)) >= self.predictors * len(MARGINS)
        self._serving, self._backlog, self._paid, self._missed = np.zeros((4, len(self._margins)))

    def take(self, sample: LoadSample, now: float) -> None:
        """Simulate the last interval, and size every fleet by the forecast at its end."""
        predicted = np.tile(np.repeat(np.array(sample.predicted), len(MARGINS)), 2)
        need = np.maximum(1.0, predicted * self._margins + sample.spare)
        if self._played_s == 0.0:
            if sample.requests == 0.0:
                return
            self._serving = np.ceil(need)
        self._played_s += sample.seconds
        part = max(sample.seconds / self._played_s, 1.0 - math.exp(-sample.seconds / _USUAL_S))
        self._usual += part * (sample.requests / sample.seconds - self._usual)
        fade = math.exp(-sample.seconds / _REMEMBERED_S)
        self._requests = fade * self._requests + sample.requests
        while self._starting and self._starting[0][0] <= now:
            self._serving += self._starting.popleft()[1]
        late, wait_s = self._flow(sample)
        have = self._serving + sum((each for _, each in self._starting), np.zeros_like(self._serving))
        self._missed = fade * self._missed + late * sample.requests
        self._paid = fade * self._paid + have * sample.seconds
        pressing = wait_s > PRESSING * sample.slack_s
        need = np.where(pressing, np.ceil(need) + np.minimum(self._backlog / sample.slack_s, predicted), need)
        size = self._window.hold(need, have, now, over_s=sample.over_s, pressing=pressing, calm=self._calm)
        self._resize(size - have, now + sample.start_s)

    def choose(self) -> ForecastChoice:
        """Return the cheapest choice that kept the SLO, or the one that missed least."""
        if self._played_s == 0.0:
            return ForecastChoice(0, _SAFE, False)
        aim = self.part * self.ledger.aim
        seen = self._requests + self._usual * _GRACE_S
        share = np.clip((_SAFE - self._margins) / (_SAFE - 1.0), 0.0, 1.2)
        allowed = max(aim * seen - self.ledger.overdrawn, _LEAST_ALLOWED * aim * seen)
        over = self._missed + aim * self._usual * _UNPROVEN_S * share - allowed
        kept = over <= 0.0
        best = int(np.argmin(np.where(kept, self._paid, math.inf) if kept.any() else over))
        fleets = self.predictors * len(MARGINS)
        return ForecastChoice(best % fleets // len(MARGINS), float(self._margins[best]), best >= fleets)

    def _flow(self, sample: LoadSample) -> tuple[Many, Many]:
        """Return the part of the interval in which arrivals had to wait for too long, and the wait at its
        end."""
        before_s = self._backlog / self._serving
        self._backlog = np.maximum(0.0, self._backlog + sample.seconds * (sample.load - self._serving))
        after_s = self._backlog / self._serving
        low, high = np.minimum(before_s, after_s), np.maximum(before_s, after_s)
        late = np.clip((high - sample.slack_s) / np.maximum(high - low, 1e-9), 0.0, 1.0)
        return np.where(high > sample.slack_s, late, 0.0), after_s

    def _resize(self, change: Many, due_s: float) -> None:
        self._starting.append((due_s, np.maximum(0.0, change)))
        going = np.maximum(0.0, -change)
        # The replicas that started last are removed first.
        for _, starting in reversed(self._starting):
            cancelled = np.minimum(going, starting)
            np.subtract(starting, cancelled, out=starting)
            going -= cancelled
        self._serving -= going
