"""The dashboards of KV and its tiers, of scaling, and of single requests."""

from __future__ import annotations

from kvasir_platform.dashboards.expressions import buckets, gauge, mean, quantile, rate
from kvasir_platform.dashboards.fleet_boards import ITL, MODELS, POOLS, STAGES, TTFT
from kvasir_platform.dashboards.panels import Dashboard, Panel, PanelRow, chart
from kvasir_platform.dashboards.queries import gauges, legend, positive, rates, ratio

KV_USAGE = "kvasir_worker_kv_usage_ratio"

_DEVICE = (
    chart(
        "KV held by running requests",
        "percentunit",
        *gauges("worker", KV_USAGE, how="max"),
    ),
    chart(
        "KV that waits to be pulled",
        "percentunit",
        ratio(gauge, "kvasir_worker_kv_blocks_leased", "kvasir_worker_kv_blocks_capacity", "pool"),
    ),
    chart(
        "KV that is free on other workers while one is full",
        "percentunit",
        (
            f"{gauge(KV_USAGE, 'pool', how='max')} - {gauge(KV_USAGE, 'pool', how='avg')}",
            legend("pool"),
        ),
        description="Fragmentation: blocks of one worker cannot be used by requests on another.",
    ),
    chart(
        "How full batches are",
        "percentunit",
        *(
            (quantile(each, "kvasir_worker_batch_usage_ratio", "pool"), legend("pool", f"p{100 * each:g}"))
            for each in (0.5, 0.95)
        ),
        description="Requests in the batch of a worker, as a fraction of `engine.max_num_seqs`.",
    ),
    chart("Requests that wait in engines", "short", *gauges("worker", "kvasir_worker_waiting")),
    chart(
        "Preempted requests",
        "short",
        *rates(
            "worker",
            "kvasir_worker_preemptions_total",
            ("kvasir_worker_swapped_in_total", "resumed from a tier"),
            ("kvasir_worker_recomputed_total", "computed again"),
        ),
    ),
)

_PREFIXES = (
    chart(
        "Hit rate by model",
        "percentunit",
        ratio(rate, "kvasir_cached_tokens_total", "kvasir_prompt_tokens_total", "model"),
    ),
    chart(
        "Hit rate by worker",
        "percentunit",
        ratio(
            rate,
            "kvasir_worker_prefix_hits_tokens_total",
            "kvasir_worker_prefix_queries_tokens_total",
            "worker",
        ),
    ),
)

_TIERS = (
    chart("Cached tokens that came from a tier", "short", *rates("model", "kvasir_tier_tokens_total")),
    chart("Tiers in trouble", "short", positive("worker tier", "kvasir_worker_tier_trouble")),
    chart(
        "Bytes in tiers",
        "bytes",
        *gauges("tier", "kvasir_worker_tier_bytes", ("kvasir_worker_tier_capacity_bytes", "capacity")),
    ),
    chart(
        "Read and written",
        "Bps",
        *rates(
            "tier",
            ("kvasir_worker_tier_loaded_bytes_total", "read"),
            ("kvasir_worker_tier_stored_bytes_total", "written"),
        ),
    ),
    chart(
        "Duration of a read",
        "s",
        ratio(rate, "kvasir_worker_tier_load_seconds_total", "kvasir_worker_tier_loads_total", "tier"),
    ),
    chart(
        "Lost blocks and failed calls",
        "short",
        *rates(
            "tier",
            ("kvasir_worker_tier_dropped_blocks_total", "not written"),
            ("kvasir_worker_tier_corrupt_blocks_total", "corrupt"),
            ("kvasir_worker_tier_failures_total", "failed calls"),
        ),
    ),
)

_TRANSFERS = (
    chart("KV transferred, by class of link", "Bps", *rates("link", "kvasir_link_transferred_bytes_total")),
    chart(
        "Wait for a transfer",
        "s",
        ratio(rate, "kvasir_link_transfer_seconds_total", "kvasir_link_transfers_total", "link", "mean"),
        (quantile(0.99, "kvasir_transfer_seconds", "model"), "{{model}} p99"),
    ),
    chart("Pulls that failed", "short", *rates("worker", "kvasir_worker_transfers_failed_total")),
)

KV = Dashboard(
    "kvasir-kv",
    "Kvasir: KV and tiers",
    "How full KV memory is, how much of prompts caches have, what tiers give, and what is transferred.",
    (
        PanelRow("Device memory", _DEVICE),
        PanelRow("Prefix cache", _PREFIXES),
        PanelRow("Tiers", _TIERS),
        PanelRow("Transfers", _TRANSFERS),
    ),
    (MODELS, POOLS),
)

_REPLICAS = (
    chart(
        "Desired and serving",
        "short",
        *gauges(
            "pool",
            ("kvasir_pool_replicas_desired", "desired"),
            ("kvasir_pool_replicas_serving", "serving"),
            ("kvasir_pool_replicas_starting", "starting"),
            how="max",
        ),
    ),
    chart(
        "Load and forecast, in busy replicas",
        "short",
        *gauges(
            "pool",
            ("kvasir_pool_load_replicas", "load"),
            ("kvasir_pool_forecast_replicas", "forecast"),
            ("kvasir_pool_forecast_upper_replicas", "with margin"),
            how="max",
        ),
        description="The forecast is for the time in which a new replica starts.",
    ),
    chart(
        "Pools whose desired size is applied",
        "short",
        *gauges("pool", "kvasir_pool_scaling_applied", how="max"),
    ),
    chart("Workers by state", "short", *gauges("pool state", "kvasir_workers", how="max")),
    chart(
        "Planner without an answer for",
        "s",
        *gauges("", ("kvasir_planner_inactive_seconds", "planner"), how="max"),
    ),
)

_LOAD = (
    chart("Requests that arrive", "reqps", *rates("model", "kvasir_requests_total")),
    chart(
        "Throughput while requests wait",
        "short",
        *gauges("model", ("kvasir_admission_tokens_per_second", "tokens a second")),
    ),
    chart(
        "KV reserved for decoding",
        "percentunit",
        ratio(gauge, "kvasir_admission_reserved_tokens", "kvasir_admission_kv_tokens", "model"),
    ),
    chart("Expected wait", "s", *gauges("model", "kvasir_admission_wait_seconds", how="max")),
)

SCALING = Dashboard(
    "kvasir-scaling",
    "Kvasir: scaling",
    "What the planner wants, what serves, and the load that decides it.",
    (PanelRow("Replicas", _REPLICAS), PanelRow("Load", _LOAD)),
    (MODELS, POOLS),
)

_HOW = """\
1. Follow an exemplar (a dot) of a slow request to its trace, or write a trace id above.
2. Or ask for slow requests as they end: `kvasir tail --slow --failed`.
3. `kvasir trace REQUEST_ID` shows its phases, `kvasir explain REQUEST_ID` why it was routed so. The id is \
the header `x-request-id` of its answer.
"""


def _heatmap(title: str, metric: str, *, exemplars: bool = False) -> Panel:
    return chart(title, "s", (buckets(metric), ""), kind="heatmap", exemplars=exemplars)


_DISTRIBUTION = (
    _heatmap("Time to first token", TTFT, exemplars=True),
    _heatmap("Duration of requests", "kvasir_request_duration_seconds", exemplars=True),
    _heatmap("Time between tokens", ITL),
    chart(
        "Where the time before a first token goes, mean",
        "s",
        *((mean(metric, "model"), legend("model", name)) for name, metric in STAGES),
        stacked=True,
    ),
)

_ONE = (
    Panel("How to find one", "", (), kind="text", width=6, text=_HOW),
    Panel("Trace", "", (), kind="traces", width=18),
)

REQUEST = Dashboard(
    "kvasir-request",
    "Kvasir: single requests",
    "How requests are distributed, where the time of one goes, and its trace.",
    (PanelRow("Distribution", _DISTRIBUTION), PanelRow("One request", _ONE)),
    (MODELS,),
    traces=True,
)
