"""Held-out loads: requests with mixed lengths, at random times or so many at a time, and their figures."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.kit.sim.virtual_batching import VirtualOutcome, VirtualRequest

from kvasir_platform.cli.calibrate.client import CalibrationClient, TimedStream

_SHORTEST, _LONGEST = 32, 1024
_LEAST_OUTPUT, _MOST_OUTPUT = 16, 64
_MOST_THREADS = 256


@dataclass(frozen=True, slots=True)
class HeldOutLoad:
    """Requests and how they are sent: at their times, or `users` at a time."""

    name: str
    requests: tuple[VirtualRequest, ...]
    users: int = 0


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Medians over requests of TTFT and of each request's mean ITL in seconds, and output tokens a second."""

    ttft_s: float
    itl_s: float
    tokens_per_s: float


def mixed_requests(number: int, rng: random.Random, rate: float = 0.0) -> tuple[VirtualRequest, ...]:
    """Return requests whose prompts are log-uniform from 32 to 1,024 tokens and whose outputs are uniform
    from 16 to 64, in a Poisson process of `rate` a second (0: all at once)."""
    at, made = 0.0, []
    for _ in range(number):
        at += rng.expovariate(rate) if rate else 0.0
        prompt = round(_SHORTEST * (_LONGEST / _SHORTEST) ** rng.random())
        made.append(VirtualRequest(at, prompt, rng.randint(_LEAST_OUTPUT, _MOST_OUTPUT)))
    return tuple(made)


def predicted(found: Sequence[VirtualOutcome]) -> LoadFigures:
    """Return the figures of a load that was played."""
    return LoadFigures(
        statistics.median(each.ttft_s for each in found),
        statistics.median(each.itl_s for each in found),
        sum(each.tokens for each in found)
        / (max(each.last_s for each in found) - min(each.at_s for each in found)),
    )


def measured(
    load: HeldOutLoad, client: CalibrationClient, tokens: Sequence[int], rng: random.Random
) -> LoadFigures:
    """Send a load, with prompts of random `tokens`, and return its figures."""
    prompts = [[rng.choice(tokens) for _ in range(each.prompt_tokens)] for each in load.requests]
    began = time.perf_counter()

    def send(number: int) -> TimedStream:
        each = load.requests[number]
        if not load.users:
            time.sleep(max(0.0, began + each.at_s - time.perf_counter()))
        return client.timed(prompts[number], each.output_tokens)

    with ThreadPoolExecutor(load.users or min(_MOST_THREADS, len(prompts))) as threads:
        found = list(threads.map(send, range(len(prompts))))
    took = max(each.times_s[-1] for each in found) - min(each.began_s for each in found)
    return LoadFigures(
        statistics.median(each.ttft_s for each in found),
        statistics.median(each.server["decode"] / (each.tokens - 1) for each in found),
        sum(each.tokens for each in found) / took,
    )
