"""The dashboards of promises and traffic, and of routing decisions."""

from __future__ import annotations

from kvasir_platform.dashboards.expressions import gauge, mean, quantile, rate
from kvasir_platform.dashboards.panels import Dashboard, Panel, PanelRow, chart

TTFT = "kvasir_time_to_first_token_seconds"
ITL = "kvasir_inter_token_latency_seconds"
STAGES = (
    ("queue", "kvasir_queue_seconds"),
    ("prefill", "kvasir_prefill_seconds"),
    ("transfer", "kvasir_transfer_seconds"),
)
POOLS = ("pool", "kvasir_workers")
MODELS = ("model", "kvasir_requests_total")


def _latency(title: str, metric: str) -> Panel:
    shares = (0.5, 0.95, 0.99)
    return chart(
        title,
        "s",
        *((quantile(share, metric, "model"), f"{{{{model}}}} p{100 * share:g}") for share in shares),
    )


def _uneven(metric: str) -> str:
    return f"{quantile(0.99, metric, 'model')} / {quantile(0.5, metric, 'model')}"


def _met() -> str:
    met = rate("kvasir_slo_requests_total", "slo", met='="yes"')
    return f"{met} / {rate('kvasir_slo_requests_total', 'slo')}"


FLEET = Dashboard(
    "kvasir-fleet",
    "Kvasir: fleet and SLO",
    "Whether promises are kept, what is missed and why, and what the fleet does.",
    (
        PanelRow(
            "Promises",
            (
                chart(
                    "Requests within their SLO",
                    "percentunit",
                    (_met(), "{{slo}}"),
                ),
                chart(
                    "Missed promises by cause",
                    "reqps",
                    (
                        rate("kvasir_slo_missed_requests_total", "promise", "cause"),
                        "{{promise}}: {{cause}}",
                    ),
                    description="The promise that a request broke first, and what took most of the time.",
                    stacked=True,
                ),
                _latency("Time to first token", TTFT),
                _latency("Time between tokens", ITL),
                chart(
                    "Unevenness: p99 / p50",
                    "short",
                    (_uneven(TTFT), "{{model}} first token"),
                    (_uneven(ITL), "{{model}} between tokens"),
                    description="Above 10, some requests or tokens wait for what others do not.",
                ),
                chart(
                    "Stages before the first token, p99",
                    "s",
                    *((quantile(0.99, metric, "model"), f"{{{{model}}}} {name}") for name, metric in STAGES),
                ),
            ),
        ),
        PanelRow(
            "Traffic",
            (
                chart(
                    "Requests by outcome",
                    "reqps",
                    (rate("kvasir_requests_total", "outcome"), "{{outcome}}"),
                    stacked=True,
                ),
                chart(
                    "Running and waiting",
                    "short",
                    (gauge("kvasir_requests_in_flight"), "in flight"),
                    (gauge("kvasir_admission_queued", "model"), "{{model}} queued"),
                    (gauge("kvasir_admission_parked", "model"), "{{model}} without a worker"),
                ),
                chart(
                    "Tokens a second",
                    "short",
                    (rate("kvasir_prompt_tokens_total", "model"), "{{model}} prompt"),
                    (rate("kvasir_output_tokens_total", "model"), "{{model}} output"),
                ),
                chart(
                    "Pressure",
                    "percentunit",
                    (gauge("kvasir_admission_pressure", "model", how="max"), "{{model}}"),
                    description="The expected wait as a fraction of the promised time to first token.",
                ),
                chart(
                    "Tenants: requests in flight",
                    "short",
                    (gauge("kvasir_tenant_requests_in_flight", "tenant"), "{{tenant}}"),
                    stacked=True,
                ),
                chart(
                    "Tenants: refused by their limits",
                    "reqps",
                    (rate("kvasir_tenant_refused_total", "tenant", "reason"), "{{tenant}}: {{reason}}"),
                ),
            ),
        ),
        PanelRow(
            "Workers",
            (
                chart(
                    "Workers by state",
                    "short",
                    (gauge("kvasir_workers", "pool", "state"), "{{pool}} {{state}}"),
                ),
                chart(
                    "Workers that are not healthy",
                    "short",
                    (
                        gauge("kvasir_worker_health", "worker", "state", how="max", state='!="healthy"')
                        + " > 0",
                        "{{worker}} {{state}}",
                    ),
                ),
                chart(
                    "Brown-out steps",
                    "short",
                    (gauge("kvasir_brownout_level", "model", how="max"), "{{model}}"),
                    width=8,
                ),
                chart(
                    "Age of the list of workers",
                    "s",
                    (gauge("kvasir_discovery_stale_seconds", how="max"), "discovery"),
                    width=8,
                ),
                chart(
                    "Certificate expires in",
                    "s",
                    (
                        f"{gauge('kvasir_gateway_certificate_expiry_timestamp_seconds', how='min')} - time()",
                        "certificate",
                    ),
                    kind="stat",
                    width=8,
                ),
            ),
        ),
    ),
    (MODELS, POOLS),
)

ROUTING = Dashboard(
    "kvasir-routing",
    "Kvasir: routing",
    "How good routing decisions are, and what the router knows.",
    (
        PanelRow(
            "Decisions",
            (
                chart(
                    "Duration of a decision",
                    "s",
                    (quantile(0.5, "kvasir_decision_seconds"), "p50"),
                    (quantile(0.99, "kvasir_decision_seconds"), "p99"),
                ),
                chart(
                    "Regret a second, by cause",
                    "s",
                    (rate("kvasir_regret_seconds_total", "model", "cause"), "{{model}} {{cause}}"),
                    description="What other decisions would have saved, with hindsight.",
                    stacked=True,
                ),
                chart(
                    "Decisions that are regretted",
                    "percentunit",
                    (
                        f"{rate('kvasir_regretted_decisions_total', 'model')} / "
                        f"{rate('kvasir_judged_decisions_total', 'model')}",
                        "{{model}}",
                    ),
                ),
                chart(
                    "Requests that were moved",
                    "reqps",
                    (rate("kvasir_retries_total", "model"), "{{model}} retried"),
                    (rate("kvasir_migrations_total", "model"), "{{model}} continued elsewhere"),
                    (
                        rate("kvasir_cross_role_requests_total", "model"),
                        "{{model}} run whole: a role is lost",
                    ),
                ),
            ),
        ),
        PanelRow(
            "Predictions",
            (
                chart(
                    "Cached tokens, predicted and found",
                    "short",
                    (rate("kvasir_predicted_cached_tokens_total", "model"), "{{model}} predicted"),
                    (rate("kvasir_cached_tokens_total", "model"), "{{model}} found"),
                ),
                chart(
                    "Error of the prediction, mean",
                    "percentunit",
                    (mean("kvasir_cached_tokens_error_ratio", "model"), "{{model}}"),
                ),
                chart(
                    "Workers whose cache the router does not know",
                    "short",
                    (
                        gauge("kvasir_worker_kv_state", "worker", "state", how="max", state='!="exact"')
                        + " > 0",
                        "{{worker}} {{state}}",
                    ),
                ),
                chart(
                    "Snapshots read",
                    "short",
                    (rate("kvasir_worker_kv_resyncs_total", "worker"), "{{worker}}"),
                ),
            ),
        ),
        PanelRow(
            "Index and load",
            (
                chart(
                    "Blocks in the index",
                    "short",
                    (gauge("kvasir_index_blocks"), "all"),
                    (gauge("kvasir_index_predicted_blocks"), "predicted"),
                    (gauge("kvasir_index_names"), "distinct"),
                ),
                chart("Memory of the index", "bytes", (gauge("kvasir_index_bytes"), "index")),
                chart(
                    "Predictions lost",
                    "short",
                    (rate("kvasir_index_expired_blocks_total"), "expired"),
                    (rate("kvasir_index_evicted_blocks_total"), "evicted"),
                ),
                chart(
                    "Requests on each worker",
                    "short",
                    (gauge("kvasir_worker_in_flight", "worker"), "{{worker}}"),
                ),
                chart(
                    "Load that a worker may receive",
                    "percentunit",
                    (gauge("kvasir_worker_share", "worker", how="min"), "{{worker}}"),
                ),
                chart(
                    "Ejections",
                    "short",
                    (rate("kvasir_worker_ejections_total", "worker"), "{{worker}}"),
                ),
            ),
        ),
    ),
    (MODELS, POOLS),
)
