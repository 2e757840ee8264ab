"""When requests arrive: point processes, drawn from a seeded source.

Rates are in requests per second. Every process is endless; who draws from it stops. The processes whose rate
varies are Poisson processes thinned to it (Lewis and Shedler, 1979).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvasir.ports.clock import Rng
from kvasir_platform.workload.distributions import gamma


class ArrivalProcess(Protocol):
    """Draws arrivals."""

    def times(self, rng: Rng) -> Iterator[float]:
        """Seconds from the start, ascending, without end."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantArrivals:
    """One arrival every 1/rate seconds."""

    rate: float

    def times(self, rng: Rng) -> Iterator[float]:
        """As the protocol says."""
        number = 0
        while True:
            yield number / self.rate
            number += 1


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Independent arrivals at one rate."""

    rate: float

    def times(self, rng: Rng) -> Iterator[float]:
        """As the protocol says."""
        at = 0.0
        while True:
            at += _exponential(self.rate, rng)
            yield at


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Gaps that are gamma distributed with the coefficient of variation `cv`: 1 is Poisson, more comes in
    clusters."""

    rate: float
    cv: float

    def times(self, rng: Rng) -> Iterator[float]:
        """As the protocol says."""
        shape = 1.0 / self.cv**2
        at = 0.0
        while True:
            at += gamma(shape, rng) / (shape * self.rate)
            yield at


@dataclass(frozen=True, slots=True)
class OnOffArrivals:
    """A mean of `rate`, with a burst of `peak` times that in the first `share` of every period."""

    rate: float
    peak: float
    period_s: float
    share: float

    def times(self, rng: Rng) -> Iterator[float]:
        """As the protocol says."""
        # The rest of the period has what the burst leaves of the mean.
        rest = max(0.0, 1.0 - self.peak * self.share) / (1.0 - self.share)

        def at(time: float) -> float:
            within = time % self.period_s < self.share * self.period_s
            return self.rate * (self.peak if within else rest)

        return _thinned(at, self.rate * max(self.peak, rest), rng)


@dataclass(frozen=True, slots=True)
class DiurnalArrivals:
    """A wave with a mean of `rate`, which begins at its lowest, and whose top is `peak` times the mean (at
    most 2)."""

    rate: float
    peak: float
    period_s: float

    def times(self, rng: Rng) -> Iterator[float]:
        """As the protocol says."""

        def at(time: float) -> float:
            return self.rate * (1.0 - (self.peak - 1.0) * math.cos(2 * math.pi * time / self.period_s))

        return _thinned(at, self.rate * self.peak, rng)


@dataclass(frozen=True, slots=True)
class RampArrivals:
    """A rate that goes from `rate` to `last` within `rise_s` seconds, and stays there."""

    rate: float
    last: float
    rise_s: float

    def times(self, rng: Rng) -> Iterator[float]:
        """As the protocol says."""

        def at(time: float) -> float:
            return self.rate + (self.last - self.rate) * min(1.0, time / self.rise_s)

        return _thinned(at, max(self.rate, self.last), rng)


def _exponential(rate: float, rng: Rng) -> float:
    return -math.log(1.0 - rng.random()) / rate


def _thinned(rate_at: Callable[[float], float], most: float, rng: Rng) -> Iterator[float]:
    at = 0.0
    while True:
        at += _exponential(most, rng)
        if rng.random() * most < rate_at(at):
            yield at
