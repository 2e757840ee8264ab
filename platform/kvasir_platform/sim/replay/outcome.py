"""The results of the requests of a replay."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from kvasir.core.requests import Role, SloClass
from kvasir_platform.sim.replay.worker import Job
from kvasir_platform.workload.requests import Workload


@dataclass(frozen=True, slots=True)
class WorkerOutcome:
    """Work of one worker. `work_s` is the engine time of its prompts and tokens, each as if alone; `busy_s`
    the time in which it had any."""

    worker_id: str
    role: Role
    work_s: float
    busy_s: float
    prefilled_tokens: int
    generated_tokens: int


class ReplayOutcome:
    """By request number: seconds to the first token, mean seconds between tokens, cached tokens; NaN or 0 for
    what has not happened."""

    def __init__(self, requests: int) -> None:
        self.ttft_s = array("d", [math.nan]) * requests
        self.itl_s = array("d", [math.nan]) * requests
        self.cached_tokens = array("q", [0]) * requests
        self.workers: tuple[WorkerOutcome, ...] = ()
        self.ended = 0
        self.misses = 0
        self.correct_predictions = 0
        self._missed = bytearray(requests)
        self._first: dict[int, Job] = {}

    def cached(self, number: int, tokens: int, predicted: int) -> None:
        """The prompt was computed with this many cached tokens, and this many predicted."""
        self.cached_tokens[number] = tokens
        self.correct_predictions += tokens == predicted

    def first_token(self, job: Job, ttft_s: float, slo: SloClass) -> None:
        """The first token arrived."""
        self.ttft_s[job.number] = ttft_s
        self._first[job.number] = job
        if ttft_s > slo.ttft_s:
            self._miss(job.number)

    def end(self, number: int, slo: SloClass) -> None:
        """The last token arrived."""
        job = self._first.pop(number)
        self.ended += 1
        tokens = job.request.output_tokens
        if tokens < 2:
            return
        self.itl_s[number] = (job.finished_s - job.first_s) / (tokens - 1)
        if self.itl_s[number] > slo.itl_s:
            self._miss(number)

    def overdue(self, number: int) -> None:
        """The deadline of the first token has passed, whether or not it has arrived."""
        if math.isnan(self.ttft_s[number]):
            self._miss(number)

    def _miss(self, number: int) -> None:
        self.misses += not self._missed[number]
        self._missed[number] = 1

    @property
    def met(self) -> float:
        """The share of all requests that met the SLO."""
        return 1.0 - self.misses / len(self.ttft_s)

    def hit_rate(self, trace: Workload) -> float:
        """Cached prompt tokens relative to an unbounded cache; 0 if that has none."""
        infinite = trace.infinite_hits()
        return sum(self.cached_tokens) / infinite if infinite else 0.0

    def ttft_quantile_s(self, part: float) -> float:
        """Of the requests that got a first token."""
        known = sorted(t for t in self.ttft_s if not math.isnan(t))
        return known[min(len(known) - 1, int(part * len(known)))]

    def imbalance(self) -> float:
        """The largest work of a worker over the mean of its pool, whose workers have one role; of several
        pools, the one where this is largest. Work is engine time of prompts and tokens."""
        pools: dict[Role, list[float]] = {}
        for worker in self.workers:
            pools.setdefault(worker.role, []).append(worker.work_s)
        return max(max(work) * len(work) / sum(work) for work in pools.values() if sum(work))
