"""Prometheus metrics of each worker and of its KV tiers, made at scrape time from the last worker views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvasir.core.kv import KvState
from kvasir.ports.router import HEALTH_STATES, WorkerView
from kvasir.telemetry.families.scraped import Rows, SeriesTable, counter, gauge

NOT_JUDGED = ("connecting", "refused")
"""States in which a worker receives no requests, so that its health is unknown."""

_Views = Collection[WorkerView]
_WORKER = ("worker", "pool")


def _worker(view: WorkerView) -> tuple[str, str]:
    return view.worker_id, view.pool


def _workers(views: _Views) -> Rows:
    return [(_worker(view), view) for view in views]


def _loads(views: _Views) -> Rows:
    return [(_worker(view), view.load) for view in views if view.load is not None]


def _tiers(views: _Views) -> Rows:
    return [
        ((*worker, tier.medium.name.lower()), tier) for worker, load in _loads(views) for tier in load.tiers
    ]


def _gpus(views: _Views) -> Rows:
    return [((*worker, str(gpu.index)), gpu) for worker, load in _loads(views) for gpu in load.gpus]


def _detailed(views: _Views) -> Rows:
    return [row for row in _gpus(views) if row[1].sm_active is not None and row[1].dram_active is not None]


def _caches(views: _Views) -> Rows:
    return [(_worker(view), view.kv) for view in views if view.kv is not None]


def _health(views: _Views) -> Rows:
    return [(_worker(view), view.health) for view in views if view.state not in NOT_JUDGED]


def _pools(views: _Views) -> Rows:
    judged = [view for view in views if view.state not in NOT_JUDGED]
    pools = sorted({view.pool for view in judged})
    return [((pool,), [view.health for view in judged if view.pool == pool]) for pool in pools]


def _states(views: _Views) -> Rows:
    return list(Counter((view.pool, view.state) for view in views).items())


WORKERS: tuple[SeriesTable[_Views], ...] = (
    SeriesTable(
        "kvasir_worker_",
        _WORKER,
        _loads,
        gauge("running", "Requests in the engine's batch", "running"),
        gauge("waiting", "Requests waiting in the engine", "waiting"),
        gauge("kv_usage_ratio", "Fraction of KV blocks held by running requests", "kv_usage"),
        gauge("kv_blocks_capacity", "KV blocks in total", "kv_blocks_total"),
        gauge("kv_blocks_leased", "KV blocks pinned until other workers pull them", "kv_blocks_leased"),
        counter("prefix_queries_tokens", "Prompt tokens looked up in the KV cache", "prefix_queries_tokens"),
        counter("prefix_hits_tokens", "Prompt tokens found in the KV cache", "prefix_hits_tokens"),
        counter("transfer_received_bytes", "KV bytes pulled", "transfer_bytes_received"),
        counter("transfers_received", "KV pulls completed", "transfers_received"),
        counter("transfers_failed", "KV pulls that failed", "transfers_failed"),
        counter(
            "transfer_peers_refused",
            "Peers refused on the ports for KV because they had no valid ticket",
            "transfer_peers_refused",
        ),
        counter("preemptions", "Requests preempted", "preemptions"),
        counter("swapped_in", "Preempted requests resumed from KV in a tier", "swapped_in"),
        counter("recomputed", "Preempted requests recomputed", "recomputed"),
        counter("speculated_tokens", "Tokens proposed by speculative decoding", "speculated_tokens"),
        counter("accepted_tokens", "Proposed tokens accepted", "accepted_tokens"),
    ),
    SeriesTable(
        "kvasir_worker_tier_",
        (*_WORKER, "tier"),
        _tiers,
        gauge("blocks", "Blocks in the tier, as counted by the worker", "blocks"),
        gauge("bytes", "Bytes used by blocks in the tier", "bytes_used"),
        gauge(
            "capacity_bytes",
            "Capacity of the tier in bytes; 0 if the worker does not manage it",
            "bytes_capacity",
        ),
        gauge("up", "1 if the tier can be read", "readable"),
        gauge(
            "trouble",
            "1 if the tier reports a problem, readable or not",
            lambda tier: bool(tier.trouble),
        ),
        counter("loads", "Batched reads", "loads"),
        counter("loaded_blocks", "Blocks read", "loaded_blocks"),
        counter("loaded_bytes", "Bytes read", "loaded_bytes"),
        counter("load_seconds", "Time spent in reads", "load_s"),
        counter("stored_blocks", "Blocks written", "stored_blocks"),
        counter("stored_bytes", "Bytes written", "stored_bytes"),
        counter("evicted_blocks", "Blocks evicted", "evicted_blocks"),
        counter("corrupt_blocks", "Blocks rejected because they were corrupt", "corrupt_blocks"),
        counter("dropped_blocks", "Blocks not written because the write queue was full", "dropped_blocks"),
        counter("failures", "Calls that failed or timed out", "failures"),
    ),
    SeriesTable(
        "kvasir_worker_gpu_",
        (*_WORKER, "gpu"),
        _gpus,
        gauge("busy_ratio", "Fraction of time in which a kernel ran on the GPU", "busy"),
        gauge("memory_used_bytes", "GPU memory in use", "memory_used"),
        gauge("memory_total_bytes", "GPU memory in total", "memory_total"),
        gauge("power_watts", "Power that the GPU draws", "power_w"),
    ),
    SeriesTable(
        "kvasir_worker_gpu_",
        (*_WORKER, "gpu"),
        _detailed,
        gauge("sm_active_ratio", "Fraction of the GPU's multiprocessors that were busy", "sm_active"),
        gauge("dram_active_ratio", "Fraction of the GPU's memory bandwidth that was used", "dram_active"),
    ),
    SeriesTable(
        "kvasir_worker_",
        _WORKER,
        _workers,
        gauge("in_flight", "Requests of this router on the worker", "in_flight"),
    ),
    SeriesTable(
        "kvasir_worker_kv_",
        _WORKER,
        _caches,
        gauge(
            "state",
            "1 for the current state of the prefix index for this worker",
            lambda kv: {each: each is kv.state for each in KvState},
            "state",
        ),
        gauge(
            "blocks",
            "Blocks of the worker in the prefix index",
            lambda kv: {"reported": kv.blocks, "predicted": kv.predicted_blocks},
            "kind",
        ),
        counter("resyncs", "Snapshots from which the index of the worker was rebuilt", "resyncs"),
        gauge(
            "error_ratio",
            "Recent mean error of predicted cached tokens, as a fraction of the prompt",
            "error_ratio",
        ),
        counter(
            "evaluated_requests", "Requests whose predicted cached tokens were compared", "evaluated_requests"
        ),
        counter("error_tokens", "Sum of the errors of predicted cached tokens", "error_tokens"),
    ),
    SeriesTable(
        "kvasir_worker_",
        _WORKER,
        _health,
        gauge(
            "health",
            "1 for the current health state of the worker",
            lambda health: {each: each == health.state for each in HEALTH_STATES},
            "state",
        ),
        gauge("share", "Load that the worker may receive, as a fraction of its peers' load", "share"),
        counter("ejections", "Ejections of the worker", "ejections"),
    ),
    SeriesTable(
        "kvasir_pool_",
        ("pool",),
        _pools,
        gauge(
            "panic",
            "1 while the pool is in panic mode: ejected workers get what healthy ones have no room for",
            lambda pool: any(health.panic for health in pool),
        ),
    ),
    SeriesTable(
        "kvasir_", ("pool", "state"), _states, gauge("workers", "Workers by state", lambda count: count)
    ),
)
