"""How much is to be kept beyond what is foreseen: rehearsed on the load that came.

A forecast is raised by a margin, and what the right one is depends on the load: none where it moves slowly,
half as much again where crowds come all at once. So for every predictor and every margin a fleet is kept in
mind that was sized by them all along. The load that comes goes through each as a fluid: replicas take their
time to start, what is too much waits, and who waits for longer than the promise allows has missed it. Which
one kept the promise, over the last day, for the fewest replicas is known then, and is followed.

This is follow-the-leader on simulated costs (Kalai and Vempala, 2005) with the promise as a constraint. What
a fluid leaves out is put right by what was truly missed: it is taken from what may be.
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
"""Over so much time the usual load is averaged."""
_GRACE_S = 3600.0
"""So much of the usual load is taken to have come before, and to have been well served."""
_UNPROVEN_S = 34_000.0
"""How long no margin at all must have sufficed before it is trusted, less the grace; and in proportion up to
`_SAFE`, which is trusted at once."""
_SAFE = 1.6
_LEAST_ALLOWED = 0.1
"""Of what may be missed, what still may when more was missed than that."""
PRESSING = 0.4
"""Of the slack: when work waits for longer, it is worked off by replicas that are asked for on top."""


@dataclass(slots=True)
class SloLedger:
    """What was promised to requests, and what was kept, over the last day. `aim` is the part of them that may
    miss its service level."""

    aim: float
    _judged: float = 0.0
    _missed: float = 0.0

    def take(self, judged: int, missed: int, seconds: float) -> None:
        """So many requests ended, and so many of them missed what a larger pool would have given them."""
        fade = math.exp(-seconds / _REMEMBERED_S)
        self._judged = fade * self._judged + judged
        self._missed = fade * self._missed + missed

    @property
    def overdrawn(self) -> float:
        """Requests by which more was missed than was aimed at."""
        return max(0.0, self._missed - self.aim * self._judged)


@dataclass(frozen=True, slots=True)
class ForecastChoice:
    """Of one role: which predictor is followed, by how much it is raised, and how replicas are kept."""

    predictor: int
    margin: float
    calm: bool


@dataclass(frozen=True, slots=True)
class LoadSample:
    """What came in the last `seconds`. `load` and what was `predicted`, by predictor, are in replicas that it
    keeps busy; `requests` came. `spare` replicas are added to every size, a start takes `start_s`, a request
    may wait for `slack_s`, and wishes are remembered for `over_s`."""

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
    """Of one role, with so many predictors; a fleet in mind for each of them, each margin, and both ways of
    keeping replicas. `part` of what the ledger's aim allows is this role's to miss."""

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
        # Columns: not calm and calm, within them by predictor, within those by margin.
        self._margins = np.tile(np.array(MARGINS), 2 * self.predictors)
        self._calm = np.arange(len(self._margins)) >= self.predictors * len(MARGINS)
        self._serving, self._backlog, self._paid, self._missed = np.zeros((4, len(self._margins)))

    def take(self, sample: LoadSample, now: float) -> None:
        """Play the last interval, and size every fleet for what is foreseen at its end."""
        predicted = np.tile(np.repeat(np.array(sample.predicted), len(MARGINS)), 2)
        wanted = np.maximum(1.0, np.ceil(predicted * self._margins + sample.spare))
        if self._played_s == 0.0:
            if sample.requests == 0.0:
                return
            self._serving = wanted.copy()
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
        wanted = np.where(
            pressing, np.ceil(wanted + np.minimum(self._backlog / sample.slack_s, predicted)), wanted
        )
        size = self._window.hold(wanted, have, now, over_s=sample.over_s, pressing=pressing, calm=self._calm)
        self._resize(size - have, now + sample.start_s)

    def choose(self) -> ForecastChoice:
        """The cheapest that kept the promise; the one that came nearest where none did."""
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
        """The part of the interval in which who came had to wait for too long, and the wait at its end."""
        before_s = self._backlog / self._serving
        self._backlog = np.maximum(0.0, self._backlog + sample.seconds * (sample.load - self._serving))
        after_s = self._backlog / self._serving
        low, high = np.minimum(before_s, after_s), np.maximum(before_s, after_s)
        late = np.clip((high - sample.slack_s) / np.maximum(high - low, 1e-9), 0.0, 1.0)
        return np.where(high > sample.slack_s, late, 0.0), after_s

    def _resize(self, change: Many, due_s: float) -> None:
        self._starting.append((due_s, np.maximum(0.0, change)))
        going = np.maximum(0.0, -change)
        # Those that have just begun to start go first.
        for _, starting in reversed(self._starting):
            cancelled = np.minimum(going, starting)
            np.subtract(starting, cancelled, out=starting)
            going -= cancelled
        self._serving -= going
