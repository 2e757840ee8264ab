"""How much work there will be by the time that a decision of now has come to bear.

Several simple predictors each foresee the highest load within the horizon: one of a replica that is asked for
now and serves at its end, and until which one that is let go cannot be had back. What came of it tells by how
much each must be raised to be right so and so often (split conformal prediction; Vovk, Gammerman and Shafer,
2005), and the one that is then the cheapest is believed: its pinball loss, that of the quantile that is
wanted (Koenker and Bassett, 1978), was the least in the back-test over what is remembered.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

REMEMBERED_S = 8 * 3600.0
"""Of forecasts, what came of them."""
_LEAST_JUDGED = 12
"""So many forecasts must have come true, or not, before anything is learned from them."""
_UNLEARNED = 1.3
"""What a load is raised by before."""
_HIGHEST, _LOWEST = 8.0, 0.25
"""No forecast is corrected by more: what was wrong by more was wrong for another reason."""
DAY_S = 86_400.0
_USUAL_S, _BEFORE_S = 7200.0, 180.0
"""What is usual is the average over the one time, and whether a load moves is told by that over the other."""
_HIGH, _MOVES = 1.25, 1.12
"""So many times the usual is high, and so many times what was before is a move."""
_LEAST_ALIKE = 40
"""So many forecasts in the same weather are enough to judge by them alone."""


class Predictor(Protocol):
    """Foresees a load from its past. `seconds` lie between two values."""

    name: str

    def take(self, value: float, seconds: float) -> None:
        """The load over the last `seconds`."""
        ...

    def ahead(self, horizon_s: float) -> float | None:
        """The load in so many seconds; None while nothing can be said."""
        ...


class Steady:
    """It stays as it was on average over some time."""

    def __init__(self, name: str, over_s: float) -> None:
        self.name = name
        self._over_s = over_s
        self._value: float | None = None

    def take(self, value: float, seconds: float) -> None:
        if self._value is None:
            self._value = value
        self._value += (1.0 - math.exp(-seconds / self._over_s)) * (value - self._value)

    def ahead(self, horizon_s: float) -> float | None:
        return self._value


class Trend:
    """It goes on to rise or fall as it has (Holt, 1957), the less the further (Gardner and McKenzie, 1985):
    the trend is damped by what it has been lately wrong by."""

    def __init__(self, name: str, level_s: float, trend_s: float, damped_s: float) -> None:
        self.name = name
        self._level_s, self._trend_s, self._damped_s = level_s, trend_s, damped_s
        self._level: float | None = None
        self._slope = 0.0

    def take(self, value: float, seconds: float) -> None:
        if self._level is None:
            self._level = value
            return
        before, a = self._level, 1.0 - math.exp(-seconds / self._level_s)
        expected = before + self._slope * seconds
        self._level = expected + a * (value - expected)
        b = 1.0 - math.exp(-seconds / self._trend_s)
        self._slope += b * ((self._level - before) / seconds - self._slope)

    def ahead(self, horizon_s: float) -> float | None:
        if self._level is None:
            return None
        reach_s = self._damped_s * (1.0 - math.exp(-horizon_s / self._damped_s))
        return max(0.0, self._level + max(0.0, self._slope) * reach_s)


class Daily:
    """It is as it was a day ago, times what today has been beside yesterday lately."""

    name = "as yesterday"

    def __init__(self, grain_s: float = 60.0) -> None:
        self._grain_s = grain_s
        self._past: deque[float] = deque(maxlen=int(DAY_S / grain_s))
        self._sum = self._seconds = 0.0
        self._recent: deque[tuple[float, float]] = deque(maxlen=15)

    def take(self, value: float, seconds: float) -> None:
        self._sum += value * seconds
        self._seconds += seconds
        if self._seconds < self._grain_s:
            return
        mean = self._sum / self._seconds
        self._sum = self._seconds = 0.0
        if len(self._past) == self._past.maxlen:
            self._recent.append((self._past[0], mean))
        self._past.append(mean)

    def ahead(self, horizon_s: float) -> float | None:
        if not self._recent:
            return None
        then, now = (sum(column) for column in zip(*self._recent, strict=True))
        last = min(len(self._past) - 1, round(horizon_s / self._grain_s))
        expected = max(list(self._past)[: last + 1])
        return expected * min(3.0, max(1 / 3, now / then)) if then > 0.0 else None


def predictors() -> list[Predictor]:
    """Those that compete, the simplest first."""
    return [
        Steady("the last minute", 60.0),
        Steady("the last five minutes", 300.0),
        Trend("the trend", 120.0, 600.0, 600.0),
        Trend("the recent trend", 60.0, 180.0, 240.0),
        Daily(),
    ]


@dataclass(frozen=True, slots=True)
class Forecast:
    """`expected` is what a predictor foresees for the horizon's highest load, `upper` what it is raised
    to."""

    now: float
    expected: float
    upper: float
    predictor: str


class _Record:
    """What one predictor foresaw, in which weather, and what came of it."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.open: deque[tuple[float, float, int]] = deque()
        self.ratios: deque[float] = deque()
        self.actual: deque[float] = deque()
        self.weather: deque[int] = deque()


class Forecaster:
    """One load. `take` its values in turn, then ask."""

    def __init__(self, made: Sequence[Predictor], *, interval_s: float, smooth_s: float) -> None:
        """`smooth_s`: what lasts shorter than this is waited out, and nothing to be sized for."""
        self._records = [_Record(predictor) for predictor in made]
        self._most = max(_LEAST_JUDGED, int(REMEMBERED_S / interval_s))
        self._smooth = max(1, round(smooth_s / interval_s))
        self._values: deque[float] = deque(maxlen=self._smooth)
        self._past: deque[tuple[float, float]] = deque()
        self._usual, self._before = Steady("usual", _USUAL_S), Steady("before", _BEFORE_S)
        self._weather = 0

    def take(self, value: float, seconds: float, now: float, horizon_s: float) -> None:
        """The load over the last `seconds`, and for how far to foresee."""
        self._values.append(value)
        smooth = sum(self._values) / len(self._values)
        self._past.append((now, smooth))
        while self._past[0][0] < now - 2 * horizon_s - seconds:
            self._past.popleft()
        self._weather = weather = self._look(smooth, seconds)
        for record in self._records:
            self._judge(record, now, horizon_s)
            record.predictor.take(value, seconds)
            ahead = record.predictor.ahead(horizon_s)
            if ahead is not None:
                record.open.append((now, ahead, weather))

    @property
    def now(self) -> float:
        """The load as it is."""
        return self._past[-1][1] if self._past else 0.0

    def forecast(self, level: float) -> Forecast:
        """The load that is not exceeded within the horizon in the part `level` of all cases."""
        best: tuple[float, Forecast] | None = None
        for record in self._records:
            if not record.open:
                continue
            ahead = record.open[-1][1]
            if len(record.ratios) < _LEAST_JUDGED:
                loss, raised = math.inf, _UNLEARNED
            else:
                ratios, actual = np.array(record.ratios), np.array(record.actual)
                alike = np.array(record.weather) == self._weather
                if np.count_nonzero(alike) >= _LEAST_ALIKE:
                    ratios, actual = ratios[alike], actual[alike]
                raised = float(np.quantile(ratios, level))
                off = (1.0 - raised / ratios) * actual
                loss = float(np.mean(np.maximum(level * off, (level - 1.0) * off)))
            raised = min(_HIGHEST, max(_LOWEST, raised))
            found = Forecast(self.now, ahead, ahead * raised, record.predictor.name)
            if best is None or loss < best[0]:
                best = loss, found
        return best[1] if best is not None else Forecast(self.now, self.now, self.now * _UNLEARNED, "nothing")

    def _judge(self, record: _Record, now: float, horizon_s: float) -> None:
        while record.open and record.open[0][0] <= now - horizon_s:
            at, ahead, weather = record.open.popleft()
            highest = max((value for when, value in self._past if at < when <= at + horizon_s), default=0.0)
            if ahead > 0.0 and highest > 0.0:
                record.ratios.append(highest / ahead)
                record.actual.append(highest)
                record.weather.append(weather)
                if len(record.ratios) > self._most:
                    record.ratios.popleft()
                    record.actual.popleft()
                    record.weather.popleft()

    def _look(self, value: float, seconds: float) -> int:
        """Whether the load is usual or high, and level, rising or falling."""
        for steady in (self._usual, self._before):
            steady.take(value, seconds)
        usual, before = self._usual.ahead(0.0) or 0.0, self._before.ahead(0.0) or 0.0
        slope = (value > _MOVES * before) - (value * _MOVES < before)
        return 3 * (value > _HIGH * usual) + slope + 1
