"""Counts the requests of a router and their outcomes, for the planner."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from kvasir.core.demand import Traffic, WorkerStats
from kvasir.core.requests import Request
from kvasir.ports.router import RequestSummary
from kvasir.telemetry.reasons import OK
from kvasir_router.decide.roofline import CostRates
from kvasir_router.fleet.work import Worker, WorkerState

_COUNTED = tuple(each.name for each in fields(Traffic))


@dataclass(slots=True)
class DemandBook:
    """Counts of one model. A request that does not end well counts as missed for lack of workers, unless its
    client or a filter ended it."""

    _counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))

    def arrived(self, request: Request) -> None:
        """A request arrived."""
        counts = self._counts
        counts["arrived"] += 1
        counts["arrived_tokens"] += len(request.tokens)

    def refused(self) -> None:
        """A request was refused on arrival, for lack of capacity."""
        self._counts["judged"] += 1

    def ended(self, summary: RequestSummary) -> None:
        """Count the outcome of an accepted request."""
        counts, usage = self._counts, summary.usage
        met = summary.slo_met
        if met is not None:
            counts["judged"] += 1
            counts["met"] += met
        if summary.outcome == OK:
            computed = max(0, usage.prompt_tokens - usage.cached_tokens)
            counts["ended"] += 1
            counts["prompt_tokens"] += usage.prompt_tokens
            counts["computed_tokens"] += computed
            counts["computed_squares"] += computed * computed
            counts["output_tokens"] += usage.output_tokens

    def traffic(self, *, waiting: int, waiting_tokens: int, parked: int, in_flight: int) -> Traffic:
        """Return all counts, with the current state of the queue."""
        moment = {
            "waiting": waiting,
            "waiting_tokens": waiting_tokens,
            "parked": parked,
            "in_flight": in_flight,
        }
        return Traffic(**(self._counts | moment))


def figures_of(worker: Worker, rates: CostRates | None) -> WorkerStats:
    """Return the figures of a worker."""
    identity, load = worker.identity, worker.reported
    kv_tokens = identity.kv_blocks * identity.kv.block_size * identity.data_parallel_size
    return WorkerStats(
        worker_id=worker.worker_id,
        pool=identity.pool,
        role=worker.role,
        serving=worker.state is WorkerState.READY,
        prefill_fixed_s=0.0 if rates is None else rates.prefill_fixed_s,
        prefill_token_s=0.0 if rates is None else rates.prefill_token_s,
        step_fixed_s=0.0 if rates is None else rates.step_fixed_s,
        step_stream_s=0.0 if rates is None else rates.step_stream_s,
        hit_tokens=0 if load is None else load.prefix_hits_tokens,
        kv_tokens=kv_tokens,
        used_tokens=0 if load is None else int(load.kv_usage * kv_tokens),
        streams=0 if load is None else load.running,
    )
