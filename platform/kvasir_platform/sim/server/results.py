"""The results of a simulated run: times of each request, work of each worker, cost."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from kvasir.core.requests import SloClass
from kvasir_platform.sim.engine.sequence import EngineTotals
from kvasir_platform.sim.engine.step_run import GapBins
from kvasir_platform.workload.requests import Workload

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """One worker: the seconds for which it existed, and what it did in them."""

    worker_id: str
    pool: str
    exists_s: float
    dollars: float | None
    totals: EngineTotals

    @property
    def utilization(self) -> float:
        """The part of its time in which steps ran."""
        return self.totals.busy_s / self.exists_s if self.exists_s > 0.0 else 0.0


class RequestTimes:
    """By request number, in seconds; NaN for what has not happened. `cached` are prompt tokens that were not
    computed."""

    def __init__(self, workload: Workload, slo: SloClass) -> None:
        count = len(workload.requests)
        self._workload, self._slo = workload, slo
        self.ttft_s = array("d", [math.nan]) * count
        self.tpot_s = array("d", [math.nan]) * count
        self.e2e_s = array("d", [math.nan]) * count
        self.cached = array("q", [0]) * count
        self.refused = bytearray(count)
        self.ended = self.met = self.predicted = 0

    def first(self, number: int, ttft_s: float) -> None:
        """The first token came."""
        if math.isnan(self.ttft_s[number]):
            self.ttft_s[number] = ttft_s

    def end(self, number: int, e2e_s: float) -> bool:
        """The last token came. Return whether the request met its SLO: TTFT, and the mean time per token."""
        tokens = self._workload.requests[number].output_tokens
        self.e2e_s[number] = e2e_s
        self.ended += 1
        met = self.ttft_s[number] <= self._slo.ttft_s
        if tokens > 1:
            self.tpot_s[number] = (e2e_s - self.ttft_s[number]) / (tokens - 1)
            met &= self.tpot_s[number] <= self._slo.itl_s
        self.met += met
        return met

    def refuse(self, number: int) -> None:
        """The request was refused, or failed."""
        self.refused[number] = 1
        self.ended += 1


@dataclass(frozen=True, slots=True, eq=False)
class ServerResult:
    """A run that has ended at `virtual_s`, in `real_s` seconds."""

    times: RequestTimes
    workers: tuple[WorkerResult, ...]
    slo: SloClass
    requests: int
    span_s: float
    virtual_s: float
    real_s: float
    infinite_hits: int
    refused: dict[str, int]
    failovers: int
    starts: int
    decisions: int

    @property
    def attainment(self) -> float:
        """The part of all requests that met the SLO."""
        return self.times.met / self.requests if self.requests else 0.0

    @property
    def goodput(self) -> float:
        """Requests per second that met the SLO, while requests arrived."""
        return self.times.met / self.span_s if self.span_s > 0.0 else 0.0

    @property
    def whole_goodput(self) -> float:
        """Requests per second that met the SLO, until the last one had ended."""
        return self.times.met / self.virtual_s if self.virtual_s > 0.0 else 0.0

    @property
    def speed(self) -> float:
        """Virtual seconds per real second."""
        return self.virtual_s / self.real_s if self.real_s > 0.0 else math.inf

    @property
    def output_tokens(self) -> float:
        """Tokens generated on all workers."""
        return sum(each.totals.generated_tokens for each in self.workers)

    @property
    def hit_rate(self) -> float:
        """Prompt tokens found in caches, relative to an unbounded cache that all workers share."""
        return sum(self.times.cached) / self.infinite_hits if self.infinite_hits else 0.0

    @property
    def utilization(self) -> float:
        """The part of all workers' time in which steps ran."""
        exists = sum(each.exists_s for each in self.workers)
        return sum(each.totals.busy_s for each in self.workers) / exists if exists else 0.0

    @property
    def dollars(self) -> float | None:
        """What all workers cost, None where a price is not known."""
        known = [each.dollars for each in self.workers if each.dollars is not None]
        return sum(known) if len(known) == len(self.workers) else None

    @property
    def dollars_per_million(self) -> float | None:
        """Dollars for a million output tokens, prompts included."""
        tokens = self.output_tokens
        return None if self.dollars is None or not tokens else self.dollars / tokens * 1e6

    def quantiles(self, values: array[float]) -> tuple[float, ...]:
        """Return the QUANTILES of what is known, NaN if nothing is."""
        known = sorted(each for each in values if not math.isnan(each))
        if not known:
            return (math.nan,) * len(QUANTILES)
        return tuple(known[min(len(known) - 1, int(part * len(known)))] for part in QUANTILES)

    def itl_quantiles(self) -> tuple[float, ...]:
        """Return the QUANTILES of the time between tokens, over all tokens of all streams."""
        bins: dict[int, float] = {}
        for worker in self.workers:
            for number, count in worker.totals.gaps.items():
                bins[number] = bins.get(number, 0.0) + count
        total, found = sum(bins.values()), []
        for part in QUANTILES:
            left = part * total
            for number in sorted(bins):
                left -= bins[number]
                if left <= 0.0:
                    found.append(GapBins.middle(number))
                    break
            else:
                found.append(math.nan)
        return tuple(found)

    @property
    def preemptions(self) -> int:
        """Sequences that made room for others."""
        return sum(each.totals.preemptions for each in self.workers)
