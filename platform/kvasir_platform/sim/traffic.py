"""Synthetic traffic: when requests arrive, how long they are, and which prefixes they share."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from kvasir.core.requests import token_ids
from kvasir.ports.clock import Rng

_FIRST_TOKEN = 100


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """Poisson arrivals at `rate` requests per second for `seconds`.

    Each prompt is one of `groups` common prefixes of `prefix_tokens` tokens, then tokens of its own;
    these and the output have geometric lengths with the means given, cut at the maxima.
    """

    rate: float
    seconds: float
    groups: int = 16
    prefix_tokens: int = 128
    mean_own_tokens: int = 96
    max_own_tokens: int = 512
    mean_output_tokens: int = 48
    max_output_tokens: int = 256
    vocab_size: int = 4096


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: `at_s` from the beginning, its prompt, and how many tokens it wants."""

    at_s: float
    group: int
    tokens: array[int]
    output_tokens: int


def poisson_traffic(rng: Rng, shape: TrafficShape) -> Iterator[Arrival]:
    """The arrivals in order. The same `rng` state gives the same traffic."""
    prefixes = [_tokens(rng, shape.prefix_tokens, shape) for _ in range(shape.groups)]
    at_s = 0.0
    while True:
        at_s -= math.log(1.0 - rng.random()) / shape.rate
        if at_s >= shape.seconds:
            return
        group = rng.randrange(shape.groups)
        own = _geometric(rng, shape.mean_own_tokens, shape.max_own_tokens)
        yield Arrival(
            at_s=at_s,
            group=group,
            tokens=prefixes[group] + _tokens(rng, own, shape),
            output_tokens=_geometric(rng, shape.mean_output_tokens, shape.max_output_tokens),
        )


def _tokens(rng: Rng, count: int, shape: TrafficShape) -> array[int]:
    return token_ids(_FIRST_TOKEN + rng.randrange(shape.vocab_size - _FIRST_TOKEN) for _ in range(count))


def _geometric(rng: Rng, mean: int, most: int) -> int:
    if mean <= 1:
        return 1
    drawn = 1 + int(math.log(1.0 - rng.random()) / math.log(1.0 - 1.0 / mean))
    return min(drawn, most)
