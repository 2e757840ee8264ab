"""How much work there will be by the time that a decision of now has come to bear.

Several simple predictors each foresee the highest load within the horizon: one of a replica that is asked for
now and serves at its end, and until which one that is let go cannot be had back. Which of them is believed,
and what is kept beyond it, is for `backtest` to say.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

DAY_S = 86_400.0
_LATELY_S = 30.0
_SURGE, _SIGMAS = 1.2, 3.0
"""So many times what has been on average is more than the noise of a load, and so many deviations of it more
than chance."""
_USUAL_S = 2400.0
"""Over so much time it is averaged what a predictor is wrong by."""
_LEAST_JUDGED = 12
"""So many forecasts must have come true, or not, before anything is learned from them."""
_WRONG_BY = 8.0
"""No forecast is corrected by more: what was wrong by more was wrong for another reason."""


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


class Surge:
    """It stays as it was on average over some time; but when it has just left that behind, it goes on to rise
    by as much again."""

    def __init__(self, name: str, over_s: float) -> None:
        self.name = name
        self._steady = Steady(name, over_s)
        self._lately: deque[tuple[float, float]] = deque()

    def take(self, value: float, seconds: float) -> None:
        self._steady.take(value, seconds)
        self._lately.append((value, seconds))
        while sum(each for _, each in self._lately) - self._lately[0][1] >= _LATELY_S:
            self._lately.popleft()

    def ahead(self, horizon_s: float) -> float | None:
        usual = self._steady.ahead(horizon_s)
        if usual is None:
            return None
        lately = sum(value * seconds for value, seconds in self._lately) / sum(
            seconds for _, seconds in self._lately
        )
        # As many as come by chance, of so many, are no crowd (Poisson).
        chance = _SIGMAS / math.sqrt(usual * _LATELY_S) if usual > 0.0 else math.inf
        return lately + (lately - usual) if lately > usual * max(_SURGE, 1.0 + chance) else usual


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


class Corrected:
    """Another predictor, less what it is wrong by on the whole."""

    def __init__(self, inner: Predictor) -> None:
        self.name = inner.name
        self._inner = inner
        self._open: deque[tuple[float, float]] = deque()
        self._now = self._observed = self._predicted = 0.0
        self._judged = 0
        self._ahead: float | None = None

    def take(self, value: float, seconds: float, horizon_s: float) -> None:
        """See Predictor; and until when it foresees."""
        self._inner.take(value, seconds)
        self._now += seconds
        fade = math.exp(-seconds / _USUAL_S)
        while self._open and self._open[0][0] <= self._now:
            self._observed = fade * self._observed + value
            self._predicted = fade * self._predicted + self._open.popleft()[1]
            self._judged += 1
        self._ahead = self._inner.ahead(horizon_s)
        if self._ahead is not None:
            self._open.append((self._now + horizon_s, self._ahead))

    @property
    def ahead(self) -> float | None:
        """The load by the end of the horizon; None while nothing can be said."""
        if self._ahead is None or self._judged < _LEAST_JUDGED or self._predicted <= 0.0:
            return self._ahead
        return self._ahead * min(_WRONG_BY, max(1 / _WRONG_BY, self._observed / self._predicted))


def predictors() -> list[Predictor]:
    """Those that compete, the simplest first."""
    return [
        Steady("the last minute", 60.0),
        Surge("the last two minutes", 120.0),
        Surge("the last three minutes", 180.0),
        Surge("the last five minutes", 300.0),
        Trend("the trend", 120.0, 600.0, 600.0),
        Daily(),
    ]
