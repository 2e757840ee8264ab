"""Metrics of one router as a whole: accounting, admission, the prefix index, and the planner's pool sizes.

A leak shows as a difference between `legs` and `accounted_requests`. Every router reports the same pool
sizes: those of the last reply of the planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvasir.core.demand import PoolPlan
from kvasir.core.locality import LinkClass
from kvasir.ports.router import Accounting, AdmissionView, CellView, LinkTransfers, RegretView
from kvasir.telemetry.families.scraped import SeriesTable, by_name, counter, gauge, single


class IndexStats(Protocol):
    """The fields of kvasir.native.TreeStats that are exposed."""

    @property
    def blocks(self) -> int: ...
    @property
    def predicted_blocks(self) -> int: ...
    @property
    def names(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def expired(self) -> int: ...
    @property
    def evicted(self) -> int: ...


TransfersByLink = Mapping[str, Mapping[LinkClass, LinkTransfers]]
"""Counts by model and class of link."""


@dataclass(frozen=True, slots=True)
class ScalingStats:
    """The planner's last reply, by pool, and the seconds since it came."""

    plans: Mapping[str, PoolPlan]
    inactive_s: float


USABLE_CELLS = frozenset(("here", "fresh", "stale"))
"""States of a CellView in which requests may go there."""


def _causes(regret: RegretView) -> Mapping[str, float]:
    return regret.causes


ACCOUNTING: SeriesTable[Accounting] = SeriesTable(
    "kvasir_router_",
    (),
    single,
    gauge("legs", "Requests running on workers", "running"),
    gauge("accounted_requests", "Requests whose work is accounted on workers", "accounted"),
    gauge("leases", "Leases on KV of prefill workers that waits to be pulled", "leases"),
    gauge("accounting_consistent", "1 if the requests served match the requests accounted for", "consistent"),
)

ADMISSION: SeriesTable[Mapping[str, AdmissionView]] = SeriesTable(
    "kvasir_",
    ("model",),
    by_name,
    gauge("admission_queued", "Requests that wait for capacity", "queued"),
    gauge("admission_parked", "Requests that wait because no worker can serve them", "parked"),
    gauge("admission_wait_seconds", "Expected wait of a typical request", "wait_s"),
    gauge("admission_pressure", "Expected wait divided by the TTFT of the SLO class", "pressure"),
    gauge("admission_tokens_per_second", "Measured throughput in prompt and output tokens", "tokens_per_s"),
    gauge("admission_reserved_tokens", "KV reserved on workers that decode", "reserved_tokens"),
    gauge("admission_kv_tokens", "KV that can be reserved on workers that decode", "kv_tokens"),
    gauge("brownout_level", "Brown-out steps in effect", "brownout.level"),
)

INDEX: SeriesTable[IndexStats] = SeriesTable(
    "kvasir_index_",
    (),
    single,
    gauge("blocks", "Blocks in the index, counted once per worker and tier", "blocks"),
    gauge("predicted_blocks", "Predicted blocks in the index", "predicted_blocks"),
    gauge("names", "Distinct blocks in the index", "names"),
    gauge("bytes", "Memory used by the index", "bytes"),
    counter("expired_blocks", "Predicted blocks that no worker confirmed before they expired", "expired"),
    counter("evicted_blocks", "Predicted blocks evicted to make room", "evicted"),
)

LINKS: SeriesTable[TransfersByLink] = SeriesTable(
    "kvasir_link_",
    ("model", "link"),
    lambda models: [
        ((model, link.label), counts) for model, links in models.items() for link, counts in links.items()
    ],
    counter("transfers", "KV transfers between workers, by class of link", "transfers"),
    counter("transferred_bytes", "KV bytes transferred between workers, by class of link", "bytes"),
    counter("transfer_seconds", "Time that decode workers waited for KV, by class of link", "seconds"),
)

REGRET: SeriesTable[Mapping[str, RegretView]] = SeriesTable(
    "kvasir_",
    ("model",),
    by_name,
    counter("judged_decisions", "Routing decisions whose regret was computed", "judged"),
    counter("regretted_decisions", "Routing decisions for which another would have cost less", "regretted"),
    counter(
        "regret_seconds", "Regret of routing decisions in seconds of cost, by cause", _causes, by="cause"
    ),
)

POOLS: SeriesTable[ScalingStats] = SeriesTable(
    "kvasir_pool_",
    ("pool",),
    lambda stats: by_name(stats.plans),
    gauge("replicas_desired", "Replicas that the planner plans for", "desired"),
    gauge("replicas_serving", "Replicas that serve", "serving"),
    gauge("replicas_starting", "Replicas requested that do not serve yet", "starting"),
    gauge("scaling_applied", "1 if the desired size is applied, 0 if it is only advised", "applied"),
)

FORECASTS: SeriesTable[ScalingStats] = SeriesTable(
    "kvasir_pool_",
    ("pool",),
    lambda stats: [
        ((pool,), plan.forecast) for pool, plan in stats.plans.items() if plan.forecast is not None
    ],
    gauge("load_replicas", "Present load in busy replicas", "load"),
    gauge("forecast_replicas", "Load that is forecast for when a new replica would serve", "expected"),
    gauge("forecast_upper_replicas", "That forecast with its margin", "upper"),
)

PLANNER: SeriesTable[ScalingStats] = SeriesTable(
    "kvasir_planner_",
    (),
    single,
    gauge("inactive_seconds", "Seconds since the planner last answered", "inactive_s"),
)

CELLS: SeriesTable[Sequence[CellView]] = SeriesTable(
    "kvasir_cell_",
    ("cell",),
    lambda cells: [((view.cell,), view) for view in cells],
    gauge("usable", "1 if requests may go to the cell", lambda view: view.state in USABLE_CELLS),
    gauge("report_age_seconds", "Age of the cell's last report", lambda view: view.age_s or 0.0),
    gauge("network_seconds", "Round trip to the cell", lambda view: view.network_s or 0.0),
    gauge("requests_in_flight", "Requests of this cell that run there", "in_flight"),
    gauge("received_requests", "Requests of other cells that run here", "received"),
    counter("requests", "Requests given to the cell, by the reason of the choice", "sent", by="reason"),
    counter("lost_requests", "Requests that were there when the cell was lost", "lost"),
    counter("failures", "Steps of keeping links that failed; the log says why", "failures"),
)
