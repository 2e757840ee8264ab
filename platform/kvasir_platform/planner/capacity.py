"""The load that one replica can serve within the SLO, from the rates that routers have measured.

Prefill: prompts wait in one queue for all workers of a pool. For the waiting time, P(W > t) is about C
exp(-(c - a) t / s) for c workers under a load of a, with prompts that take s (Erlang's delay formula;
Kleinrock, Queueing Systems I, 3.4), and longer by (1 + v) / 2 where the cost of prompts varies by v (Kingman,
1961). With C at its worst, 1, the spare capacity that keeps all but a part e of the requests within slack t
is c - a = (s / t) ln(1 / e) (1 + v) / 2.

Decode: a step with n streams takes f + n g. A worker is full when a step would take longer than the ITL of
the SLO, or its KV memory is full.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvasir.core.demand import WorkerStats
from kvasir.core.requests import Role
from kvasir_platform.planner.demand import Mix

_ITL_PART = 0.9
"""Share of the SLO's ITL that a step of a full batch may take; the rest is for prompts in the same step, and
for variance."""
_KV_PART = 0.95
"""Usable share of KV memory: blocks are partly filled."""
_SEATS_PART = 0.7
"""Share of `max_num_seqs` at which a replica counts as full; the rest is for bursts."""
_EXCEEDED = 0.005
"""Share of requests that may wait for longer than the slack, by the formula."""
_LEAST_SLACK = 0.1
"""Minimum slack, as a share of the TTFT, if computing a prompt takes nearly all of it."""


@dataclass(frozen=True, slots=True)
class SloTarget:
    """The tightest SLO of a deployment, in seconds."""

    ttft_s: float
    itl_s: float

    def slack_s(self, prompt_s: float) -> float:
        """Return how long a prompt may wait, given the time to compute it."""
        return max(_LEAST_SLACK * self.ttft_s, self.ttft_s - prompt_s)


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """Rates of a typical worker of a pool; fields as in WorkerStats."""

    prefill_fixed_s: float
    prefill_token_s: float
    step_fixed_s: float
    step_stream_s: float
    kv_tokens: float
    used_per_stream: float

    @classmethod
    def of(cls, workers: Sequence[WorkerStats]) -> WorkerRates | None:
        """Return the median of each rate, None without workers."""
        if not workers:
            return None
        streams = sum(each.streams for each in workers)
        return cls(
            prefill_fixed_s=statistics.median(each.prefill_fixed_s for each in workers),
            prefill_token_s=statistics.median(each.prefill_token_s for each in workers),
            step_fixed_s=statistics.median(each.step_fixed_s for each in workers),
            step_stream_s=statistics.median(each.step_stream_s for each in workers),
            kv_tokens=statistics.median(each.kv_tokens for each in workers),
            used_per_stream=sum(each.used_tokens for each in workers) / streams if streams else 0.0,
        )


_FITTED = ("prefill_fixed_s", "prefill_token_s", "step_fixed_s", "step_stream_s")
_RATES_S = 300.0
"""Seconds over which fitted times are averaged: a router's fit follows the last seconds of a busy pool, with
their errors, and a pool that followed those would start and stop replicas."""


@dataclass(slots=True)
class SteadyRates:
    """The average fitted times of a pool, with exponentially decaying weights. Those of the first minutes
    count alike: the very first are what the hardware was expected to do."""

    _weight: float = 0.0
    _times: tuple[float, ...] = (0.0,) * len(_FITTED)

    def take(self, rates: WorkerRates, seconds: float) -> WorkerRates:
        """Take the rates of the last `seconds`. Return them with the averages."""
        self._weight = math.exp(-seconds / _RATES_S) * self._weight + seconds
        share = seconds / self._weight
        self._times = tuple(
            average + share * (getattr(rates, name) - average)
            for name, average in zip(_FITTED, self._times, strict=True)
        )
        return replace(rates, **dict(zip(_FITTED, self._times, strict=True)))


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of one replica. `prompt_tokens_s`: prompt tokens that it computes per second;
    `output_tokens_s`: tokens that it generates per second with `streams` at once. `spare`: replicas beyond
    the load that keep waits within the slack. `by` is what bounds it: `itl`, `memory` or `seats`."""

    prompt_tokens_s: float
    output_tokens_s: float
    streams: int
    spare: float
    by: str


def capacity(rates: WorkerRates, mix: Mix, promise: SloTarget, role: Role, *, most_streams: int) -> Capacity:
    """Return the capacity of a replica of a pool of that role for such requests."""
    computed = max(1.0, mix.computed_tokens)
    prompt_s = max(1e-9, rates.prefill_fixed_s + computed * rates.prefill_token_s)
    streams, by = _full(rates, mix, promise, most_streams)
    step_s = max(1e-9, rates.step_fixed_s + streams * rates.step_stream_s)
    stay_s = mix.output_tokens * step_s
    served_s = stay_s / streams if role is Role.DECODE else prompt_s
    slack_s = promise.slack_s(prompt_s)
    uneven = 1.0 if role is Role.DECODE else (1.0 + mix.unevenness) / 2
    return Capacity(
        prompt_tokens_s=computed / prompt_s,
        output_tokens_s=streams / step_s,
        streams=streams,
        spare=served_s / slack_s * math.log(1.0 / _EXCEEDED) * uneven,
        by=by,
    )


def seats(most: int) -> Capacity:
    """Return the capacity of an embedding replica, in concurrent inputs: the duration of batches is not
    measured."""
    return Capacity(
        prompt_tokens_s=_SEATS_PART * most, output_tokens_s=math.inf, streams=most, spare=0.0, by="seats"
    )


def _full(rates: WorkerRates, mix: Mix, promise: SloTarget, most_streams: int) -> tuple[int, str]:
    """Return how many streams fill a worker, and by which bound."""
    bounds = [(float(most_streams), "seats")]
    left_s = _ITL_PART * promise.itl_s - rates.step_fixed_s
    if rates.step_stream_s > 0.0:
        bounds.append((left_s / rates.step_stream_s, "itl"))
    held = rates.used_per_stream or mix.prompt_tokens + mix.output_tokens / 2
    if held > 0.0 and rates.kv_tokens > 0.0:
        bounds.append((_KV_PART * rates.kv_tokens / held, "memory"))
    streams, by = min(bounds)
    return max(1, int(streams)), by
