"""Distributions of lengths and of popularity, drawn from a seeded source."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from kvasir.ports.clock import Rng

_P95 = 1.6448536269514722
"""The 95th percentile of the standard normal distribution."""


class LengthDistribution(Protocol):
    """Draws numbers of tokens."""

    def draw(self, rng: Rng) -> int:
        """At least 1."""
        ...

    @property
    def mean(self) -> float:
        """The expected length, before any limit."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLength:
    """Always the same."""

    tokens: int

    def draw(self, rng: Rng) -> int:
        """As the protocol says."""
        return self.tokens

    @property
    def mean(self) -> float:
        """As the protocol says."""
        return float(self.tokens)


@dataclass(frozen=True, slots=True)
class LogNormalLength:
    """The lognormal distribution with this median and 95th percentile, which is the larger."""

    median: float
    p95: float

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm."""
        return math.log(self.p95 / self.median) / _P95

    def draw(self, rng: Rng) -> int:
        """As the protocol says."""
        return max(1, round(self.median * math.exp(self.sigma * normal(rng))))

    @property
    def mean(self) -> float:
        """As the protocol says."""
        return self.median * math.exp(self.sigma**2 / 2)


@dataclass(frozen=True, slots=True)
class SampledLength:
    """One of the lengths of a trace."""

    lengths: tuple[int, ...]

    def draw(self, rng: Rng) -> int:
        """As the protocol says."""
        return max(1, self.lengths[rng.randrange(len(self.lengths))])

    @property
    def mean(self) -> float:
        """As the protocol says."""
        return sum(self.lengths) / len(self.lengths)


class Zipf:
    """Numbers from 0 to `count` - 1, number k with a weight of 1/(k + 1)^exponent; exponent 0 is uniform."""

    def __init__(self, count: int, exponent: float) -> None:
        weights = ((k + 1) ** -exponent for k in range(count))
        self._sums: Sequence[float] = tuple(accumulate(weights))

    def draw(self, rng: Rng) -> int:
        """One of them."""
        return min(bisect_right(self._sums, rng.random() * self._sums[-1]), len(self._sums) - 1)


def normal(rng: Rng) -> float:
    """The standard normal distribution (Box and Muller, 1958)."""
    radius = math.sqrt(-2.0 * math.log(1.0 - rng.random()))
    return radius * math.cos(2.0 * math.pi * rng.random())


def gamma(shape: float, rng: Rng) -> float:
    """The gamma distribution of this shape and scale 1 (Marsaglia and Tsang, 2000)."""
    if shape < 1.0:
        # A gamma variable of the next shape, times a power of a uniform one.
        return gamma(shape + 1.0, rng) * math.pow(1.0 - rng.random(), 1.0 / shape)
    d = shape - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    while True:
        x = normal(rng)
        v = (1.0 + c * x) ** 3
        if v > 0.0 and math.log(1.0 - rng.random()) < x * x / 2 + d - d * v + d * math.log(v):
            return d * v
