"""The dashboards of KV and its tiers, of scaling, and of single requests."""

from __future__ import annotations

from kvasir_platform.dashboards.expressions import buckets, gauge, mean, quantile, rate
from kvasir_platform.dashboards.fleet_boards import ITL, MODELS, POOLS, STAGES, TTFT
from kvasir_platform.dashboards.panels import Dashboard, Panel, PanelRow, chart


def _per(above: str, below: str) -> str:
    return f"{above} / {below}"


KV = Dashboard(
    "kvasir-kv",
    "Kvasir: KV and tiers",
    "How full KV memory is, how much of prompts caches have, what tiers give, and what is transferred.",
    (
        PanelRow(
            "Device memory",
            (
                chart(
                    "KV held by running requests",
                    "percentunit",
                    (gauge("kvasir_worker_kv_usage_ratio", "worker", how="max"), "{{worker}}"),
                ),
                chart(
                    "KV that waits to be pulled",
                    "percentunit",
                    (
                        _per(
                            gauge("kvasir_worker_kv_blocks_leased", "pool"),
                            gauge("kvasir_worker_kv_blocks_capacity", "pool"),
                        ),
                        "{{pool}}",
                    ),
                ),
                chart(
                    "Requests that wait in engines",
                    "short",
                    (gauge("kvasir_worker_waiting", "worker"), "{{worker}}"),
                ),
                chart(
                    "Preempted requests",
                    "short",
                    (rate("kvasir_worker_preemptions_total", "worker"), "{{worker}}"),
                    (rate("kvasir_worker_swapped_in_total", "worker"), "{{worker}} resumed from a tier"),
                    (rate("kvasir_worker_recomputed_total", "worker"), "{{worker}} computed again"),
                ),
            ),
        ),
        PanelRow(
            "Prefix cache",
            (
                chart(
                    "Hit rate by model",
                    "percentunit",
                    (
                        _per(
                            rate("kvasir_cached_tokens_total", "model"),
                            rate("kvasir_prompt_tokens_total", "model"),
                        ),
                        "{{model}}",
                    ),
                ),
                chart(
                    "Hit rate by worker",
                    "percentunit",
                    (
                        _per(
                            rate("kvasir_worker_prefix_hits_tokens_total", "worker"),
                            rate("kvasir_worker_prefix_queries_tokens_total", "worker"),
                        ),
                        "{{worker}}",
                    ),
                ),
            ),
        ),
        PanelRow(
            "Tiers",
            (
                chart(
                    "Cached tokens that came from a tier",
                    "short",
                    (rate("kvasir_tier_tokens_total", "model"), "{{model}}"),
                ),
                chart(
                    "Tiers in trouble",
                    "short",
                    (
                        gauge("kvasir_worker_tier_trouble", "worker", "tier", how="max") + " > 0",
                        "{{worker}} {{tier}}",
                    ),
                ),
                chart(
                    "Bytes in tiers",
                    "bytes",
                    (gauge("kvasir_worker_tier_bytes", "tier"), "{{tier}}"),
                    (gauge("kvasir_worker_tier_capacity_bytes", "tier"), "{{tier}} capacity"),
                ),
                chart(
                    "Read and written",
                    "Bps",
                    (rate("kvasir_worker_tier_loaded_bytes_total", "tier"), "{{tier}} read"),
                    (rate("kvasir_worker_tier_stored_bytes_total", "tier"), "{{tier}} written"),
                ),
                chart(
                    "Duration of a read",
                    "s",
                    (
                        _per(
                            rate("kvasir_worker_tier_load_seconds_total", "tier"),
                            rate("kvasir_worker_tier_loads_total", "tier"),
                        ),
                        "{{tier}}",
                    ),
                ),
                chart(
                    "Lost blocks and failed calls",
                    "short",
                    (rate("kvasir_worker_tier_dropped_blocks_total", "tier"), "{{tier}} not written"),
                    (rate("kvasir_worker_tier_corrupt_blocks_total", "tier"), "{{tier}} corrupt"),
                    (rate("kvasir_worker_tier_failures_total", "tier"), "{{tier}} failed calls"),
                ),
            ),
        ),
        PanelRow(
            "Transfers",
            (
                chart(
                    "KV transferred, by class of link",
                    "Bps",
                    (rate("kvasir_link_transferred_bytes_total", "link"), "{{link}}"),
                ),
                chart(
                    "Wait for a transfer",
                    "s",
                    (
                        _per(
                            rate("kvasir_link_transfer_seconds_total", "link"),
                            rate("kvasir_link_transfers_total", "link"),
                        ),
                        "{{link}} mean",
                    ),
                    (quantile(0.99, "kvasir_transfer_seconds", "model"), "{{model}} p99"),
                ),
                chart(
                    "Pulls that failed",
                    "short",
                    (rate("kvasir_worker_transfers_failed_total", "worker"), "{{worker}}"),
                ),
            ),
        ),
    ),
    (MODELS, POOLS),
)

SCALING = Dashboard(
    "kvasir-scaling",
    "Kvasir: scaling",
    "What the planner wants, what serves, and the load that decides it.",
    (
        PanelRow(
            "Replicas",
            (
                chart(
                    "Desired and serving",
                    "short",
                    (gauge("kvasir_pool_replicas_desired", "pool", how="max"), "{{pool}} desired"),
                    (gauge("kvasir_pool_replicas_serving", "pool", how="max"), "{{pool}} serving"),
                    (gauge("kvasir_pool_replicas_starting", "pool", how="max"), "{{pool}} starting"),
                ),
                chart(
                    "Load and forecast, in busy replicas",
                    "short",
                    (gauge("kvasir_pool_load_replicas", "pool", how="max"), "{{pool}} load"),
                    (gauge("kvasir_pool_forecast_replicas", "pool", how="max"), "{{pool}} forecast"),
                    (gauge("kvasir_pool_forecast_upper_replicas", "pool", how="max"), "{{pool}} with margin"),
                    description="The forecast is for the time in which a new replica starts.",
                ),
                chart(
                    "Pools whose desired size is applied",
                    "short",
                    (gauge("kvasir_pool_scaling_applied", "pool", how="max"), "{{pool}}"),
                ),
                chart(
                    "Workers by state",
                    "short",
                    (gauge("kvasir_workers", "pool", "state", how="max"), "{{pool}} {{state}}"),
                ),
                chart(
                    "Planner without an answer for",
                    "s",
                    (gauge("kvasir_planner_inactive_seconds", how="max"), "planner"),
                ),
            ),
        ),
        PanelRow(
            "Load",
            (
                chart(
                    "Requests that arrive",
                    "reqps",
                    (rate("kvasir_requests_total", "model"), "{{model}}"),
                ),
                chart(
                    "Throughput while requests wait",
                    "short",
                    (gauge("kvasir_admission_tokens_per_second", "model"), "{{model}} tokens a second"),
                ),
                chart(
                    "KV reserved for decoding",
                    "percentunit",
                    (
                        _per(
                            gauge("kvasir_admission_reserved_tokens", "model"),
                            gauge("kvasir_admission_kv_tokens", "model"),
                        ),
                        "{{model}}",
                    ),
                ),
                chart(
                    "Expected wait",
                    "s",
                    (gauge("kvasir_admission_wait_seconds", "model", how="max"), "{{model}}"),
                ),
            ),
        ),
    ),
    (MODELS, POOLS),
)

_HOW = """\
1. Follow an exemplar (a dot) of a slow request to its trace, or write a trace id above.
2. Or ask for slow requests as they end: `kvasir tail --slow --failed`.
3. `kvasir trace REQUEST_ID` shows its phases, `kvasir explain REQUEST_ID` why it was routed so. The id is \
the header `x-request-id` of its answer.
"""

REQUEST = Dashboard(
    "kvasir-request",
    "Kvasir: single requests",
    "How requests are distributed, where the time of one goes, and its trace.",
    (
        PanelRow(
            "Distribution",
            (
                chart("Time to first token", "s", (buckets(TTFT), ""), kind="heatmap", exemplars=True),
                chart(
                    "Duration of requests",
                    "s",
                    (buckets("kvasir_request_duration_seconds"), ""),
                    kind="heatmap",
                    exemplars=True,
                ),
                chart("Time between tokens", "s", (buckets(ITL), ""), kind="heatmap"),
                chart(
                    "Where the time before a first token goes, mean",
                    "s",
                    *((mean(metric, "model"), f"{{{{model}}}} {name}") for name, metric in STAGES),
                    stacked=True,
                ),
            ),
        ),
        PanelRow(
            "One request",
            (
                Panel("How to find one", "", (), kind="text", width=6, text=_HOW),
                Panel("Trace", "", (), kind="traces", width=18),
            ),
        ),
    ),
    (MODELS,),
    traces=True,
)
