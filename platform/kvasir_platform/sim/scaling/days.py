"""Days of traffic whose rate is known only to who made it: a slow wave, and crowds that come all at once.

When requests come is drawn; what they are like is taken, at random, from a recorded trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

DAY_S = 86_400.0
_GRAIN_S = 1.0
_NOISE_S = 60.0


class RequestShape(NamedTuple):
    """What one request is like, in tokens; `computed` is the part of its prompt that no cache has."""

    prompt: int
    computed: int
    output: int


@dataclass(frozen=True, slots=True)
class LoadBurst:
    """A crowd that comes at `at_s`: within `rise_s` the rate grows by `times` the base, stays for `stays_s`,
    and falls off with a time constant of `falls_s`."""

    at_s: float
    times: float
    rise_s: float
    stays_s: float
    falls_s: float

    def factor(self, at: np.ndarray) -> np.ndarray:
        """What it adds, in parts of the base rate, at these times."""
        since = at - self.at_s
        rising = np.clip(since / self.rise_s, 0.0, 1.0)
        over = np.maximum(0.0, since - self.rise_s - self.stays_s)
        return np.asarray(self.times * rising * np.exp(-over / self.falls_s))


@dataclass(frozen=True, slots=True)
class Day:
    """A rate in requests a second: `least` at four in the morning and `most` at four in the afternoon, with a
    shoulder at noon; times the crowds; times noise that lasts about a minute, of this relative size."""

    least: float
    most: float
    noise: float
    crowds: tuple[LoadBurst, ...] = field(default=())
    length_s: float = DAY_S

    def rates(self, rng: np.random.Generator) -> np.ndarray:
        """For each second."""
        at = np.arange(0.0, self.length_s, _GRAIN_S)
        turn = 2 * math.pi * at / DAY_S
        wave = 0.5 - 0.5 * np.cos(turn - 2 * math.pi * 4 / 24) + 0.08 * np.sin(3 * turn)
        base = self.least + (self.most - self.least) * np.clip(wave, 0.0, 1.0)
        factor = np.ones_like(at)
        for crowd in self.crowds:
            factor += crowd.factor(at)
        return np.asarray(base * factor * self._noise(rng, len(at)))

    def _noise(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """First-order autoregressive, on the logarithm, with mean 1."""
        if self.noise == 0.0:
            return np.ones(count)
        keep = math.exp(-_GRAIN_S / _NOISE_S)
        shocks = rng.normal(0.0, self.noise * math.sqrt(1.0 - keep * keep), count)
        found, value = np.empty(count), rng.normal(0.0, self.noise)
        for i, shock in enumerate(shocks):
            value = keep * value + shock
            found[i] = value
        return np.exp(found - self.noise**2 / 2)


def crowds(count: int, rng: np.random.Generator, length_s: float = DAY_S) -> tuple[LoadBurst, ...]:
    """So many crowds over the day, each of its own kind."""
    return tuple(
        LoadBurst(
            at_s=float(rng.uniform(0.02, 0.98) * length_s),
            times=float(rng.uniform(0.5, 2.0)),
            rise_s=float(rng.uniform(60.0, 300.0)),
            stays_s=float(rng.uniform(300.0, 1500.0)),
            falls_s=float(rng.uniform(120.0, 600.0)),
        )
        for _ in range(count)
    )


def arrivals(rates: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Times of arrival: in each second a Poisson number, evenly spread."""
    counts = rng.poisson(rates * _GRAIN_S)
    at = np.repeat(np.arange(len(rates)) * _GRAIN_S, counts)
    return np.sort(at + rng.random(len(at)) * _GRAIN_S)


def drawn(shapes: Sequence[RequestShape], count: int, rng: np.random.Generator) -> list[RequestShape]:
    """So many requests like these."""
    return [shapes[i] for i in rng.integers(0, len(shapes), count).tolist()]
