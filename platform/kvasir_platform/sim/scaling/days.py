"""Days of generated traffic: a slow wave, with optional bursts.

Arrival times are drawn; the requests are sampled from a recorded trace.
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
    """One request in tokens; `computed` is the part of its prompt that no cache has."""

    prompt: int
    computed: int
    output: int


@dataclass(frozen=True, slots=True)
class LoadBurst:
    """A burst at `at_s`: within `rise_s` the rate grows by `times` the base, stays for `stays_s`, and decays
    with a time constant of `falls_s`."""

    at_s: float
    times: float
    rise_s: float
    stays_s: float
    falls_s: float

    def factor(self, at: np.ndarray) -> np.ndarray:
        """The additional rate at these times, relative to the base rate."""
        since = at - self.at_s
        rising = np.clip(since / self.rise_s, 0.0, 1.0)
        over = np.maximum(0.0, since - self.rise_s - self.stays_s)
        return np.asarray(self.times * rising * np.exp(-over / self.falls_s))


@dataclass(frozen=True, slots=True)
class Day:
    """A rate in requests per second: `least` at four in the morning and `most` at four in the afternoon, with
    a shoulder at noon; times the bursts; times noise with a correlation time of about a minute, of this
    relative size."""

    least: float
    most: float
    noise: float
    crowds: tuple[LoadBurst, ...] = field(default=())
    length_s: float = DAY_S

    def rates(self, rng: np.random.Generator) -> np.ndarray:
        """The rate of each second."""
        at = np.arange(0.0, self.length_s, _GRAIN_S)
        turn = 2 * math.pi * at / DAY_S
        wave = 0.5 - 0.5 * np.cos(turn - 2 * math.pi * 4 / 24) + 0.08 * np.sin(3 * turn)
        base = self.least + (self.most - self.least) * np.clip(wave, 0.0, 1.0)
        factor = np.ones_like(at)
        for crowd in self.crowds:
            factor += crowd.factor(at)
        return np.asarray(base * factor * self._noise(rng, len(at)))

    def _noise(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """First-order autoregressive noise on the logarithm, with mean 1."""
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
    """That many random bursts over the day."""
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
    """Arrival times: a Poisson number in each second, evenly spread."""
    counts = rng.poisson(rates * _GRAIN_S)
    at = np.repeat(np.arange(len(rates)) * _GRAIN_S, counts)
    return np.sort(at + rng.random(len(at)) * _GRAIN_S)


def drawn(shapes: Sequence[RequestShape], count: int, rng: np.random.Generator) -> list[RequestShape]:
    """That many requests sampled from these."""
    return [shapes[i] for i in rng.integers(0, len(shapes), count).tolist()]
