"""Forecasts of the load at the time at which a present decision takes effect.

Several simple predictors each forecast the highest load within the horizon: at its end a replica serves that
is requested now, and until then one that is removed cannot be replaced. `backtest` chooses the predictor and
the margin.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

DAY_S = 86_400.0
_LATELY_S = 30.0
_SURGE, _SIGMAS = 1.2, 3.0
"""A load above this multiple of the average exceeds noise, and above this many deviations exceeds chance."""
_STEEP = 4.0
"""How many times its excess over noise a load rises at most, so that a load that exceeds noise by little, for
one interval, starts few replicas."""
_USUAL_S = 2400.0
"""Seconds over which a predictor's errors are averaged."""
_LEAST_JUDGED = 12
"""Number of forecasts that must have been verified before errors are corrected."""
_WRONG_BY = 8.0
"""Maximum correction of a forecast; larger errors have other causes."""


class Predictor(Protocol):
    """Predicts a load from its past. Values are `seconds` apart."""

    name: str

    def take(self, value: float, seconds: float) -> None:
        """Take the load of the last `seconds`."""
        ...

    def ahead(self, horizon_s: float) -> float | None:
        """Return the load in `ahead` seconds; None while there is no basis."""
        ...


class Steady:
    """The load stays at its average over some time."""

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
    """The load stays at its average over some time; once it has just risen above it, it rises by as much
    again."""

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
        # A count that a Poisson process reaches by chance is not a surge.
        chance = _SIGMAS / math.sqrt(usual * _LATELY_S) if usual > 0.0 else math.inf
        excess = lately - usual * max(_SURGE, 1.0 + chance)
        return usual + max(0.0, min(2.0 * (lately - usual), _STEEP * excess))


class Trend:
    """The load continues its trend (Holt, 1957), less the further ahead (Gardner and McKenzie, 1985): the
    trend is damped by its recent error."""

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
    """The load is that of a day ago, times the ratio of today's to yesterday's recent load."""

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
    """Another predictor, corrected by its average error."""

    def __init__(self, inner: Predictor) -> None:
        self.name = inner.name
        self._inner = inner
        self._open: deque[tuple[float, float]] = deque()
        self._now = self._observed = self._predicted = 0.0
        self._judged = 0
        self._ahead: float | None = None

    def take(self, value: float, seconds: float, horizon_s: float) -> None:
        """See Predictor. `horizon_s` is how far ahead forecasts reach."""
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
        """Return the load by the end of the horizon; None while there is no basis."""
        if self._ahead is None or self._judged < _LEAST_JUDGED or self._predicted <= 0.0:
            return self._ahead
        return self._ahead * min(_WRONG_BY, max(1 / _WRONG_BY, self._observed / self._predicted))


def predictors() -> list[Predictor]:
    """Return the competing predictors, the simplest first."""
    return [
        Steady("the last minute", 60.0),
        Surge("the last two minutes", 120.0),
        Surge("the last three minutes", 180.0),
        Surge("the last five minutes", 300.0),
        Trend("the trend", 120.0, 600.0, 600.0),
        Daily(),
    ]
