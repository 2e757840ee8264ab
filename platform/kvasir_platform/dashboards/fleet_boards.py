"""The dashboards of promises and traffic, and of routing decisions."""

from __future__ import annotations

from kvasir_platform.dashboards.expressions import gauge, mean, quantile, rate
from kvasir_platform.dashboards.panels import Dashboard, Panel, PanelRow, chart
from kvasir_platform.dashboards.queries import gauges, legend, positive, rates, ratio

TTFT = "kvasir_time_to_first_token_seconds"
ITL = "kvasir_inter_token_latency_seconds"
STAGES = (
    ("queue", "kvasir_queue_seconds"),
    ("prefill", "kvasir_prefill_seconds"),
    ("transfer", "kvasir_transfer_seconds"),
)
POOLS = ("pool", "kvasir_workers")
MODELS = ("model", "kvasir_requests_total")
TENANTS = ("tenant", "kvasir_tenant_requests_total")


def _latency(title: str, metric: str) -> Panel:
    shares = (0.5, 0.95, 0.99)
    lines = ((quantile(each, metric, "model"), legend("model", f"p{100 * each:g}")) for each in shares)
    return chart(title, "s", *lines)


def _uneven(metric: str, words: str) -> tuple[str, str]:
    return f"{quantile(0.99, metric, 'model')} / {quantile(0.5, metric, 'model')}", legend("model", words)


def _met() -> str:
    met = rate("kvasir_slo_requests_total", "model", "slo", met='="yes"')
    return f"{met} / {rate('kvasir_slo_requests_total', 'model', 'slo')}"


_PROMISES = (
    chart("Requests within their SLO", "percentunit", (_met(), legend("model slo"))),
    chart(
        "Missed promises by cause",
        "reqps",
        (rate("kvasir_slo_missed_requests_total", "promise", "cause"), "{{promise}}: {{cause}}"),
        description="The promise that a request broke first, and what took most of the time.",
        stacked=True,
    ),
    _latency("Time to first token", TTFT),
    _latency("Time between tokens", ITL),
    chart(
        "Unevenness: p99 / p50",
        "short",
        _uneven(TTFT, "first token"),
        _uneven(ITL, "between tokens"),
        description="Above 10, some requests or tokens wait for what others do not.",
    ),
    chart(
        "Stages before the first token, p99",
        "s",
        *((quantile(0.99, metric, "model"), legend("model", name)) for name, metric in STAGES),
    ),
)

_TRAFFIC = (
    chart("Requests by outcome", "reqps", *rates("outcome", "kvasir_requests_total"), stacked=True),
    chart(
        "Running and waiting",
        "short",
        *gauges("", ("kvasir_requests_in_flight", "in flight")),
        *gauges(
            "model", ("kvasir_admission_queued", "queued"), ("kvasir_admission_parked", "without a worker")
        ),
    ),
    chart(
        "Tokens a second",
        "short",
        *rates("model", ("kvasir_prompt_tokens_total", "prompt"), ("kvasir_output_tokens_total", "output")),
    ),
    chart(
        "Pressure",
        "percentunit",
        *gauges("model", "kvasir_admission_pressure", how="max"),
        description="The expected wait as a fraction of the promised time to first token.",
    ),
    chart(
        "Tenants: requests in flight",
        "short",
        *gauges("tenant", "kvasir_tenant_requests_in_flight"),
        stacked=True,
    ),
    chart(
        "Tenants: refused by their limits",
        "reqps",
        (rate("kvasir_tenant_refused_total", "tenant", "reason"), "{{tenant}}: {{reason}}"),
    ),
)

_EXPIRY = gauge("kvasir_gateway_certificate_expiry_timestamp_seconds", how="min")
_WORKERS = (
    chart("Workers by state", "short", *gauges("pool state", "kvasir_workers")),
    chart(
        "Workers that are not healthy",
        "short",
        positive("worker state", "kvasir_worker_health", state='!="healthy"'),
    ),
    chart("Brown-out steps", "short", *gauges("model", "kvasir_brownout_level", how="max"), width=8),
    chart(
        "Age of the list of workers",
        "s",
        *gauges("", ("kvasir_discovery_stale_seconds", "discovery"), how="max"),
        width=8,
    ),
    chart("Certificate expires in", "s", (f"{_EXPIRY} - time()", "certificate"), kind="stat", width=8),
)

_GPU = "kvasir_worker_gpu_"
_GPUS = (
    chart(
        "GPUs: time in which a kernel ran",
        "percentunit",
        *gauges("worker gpu", f"{_GPU}busy_ratio", how="max"),
        description="A GPU that is busy all the time can still have room: see the next panel.",
    ),
    chart(
        "GPUs: multiprocessors and memory bandwidth in use",
        "percentunit",
        *gauges(
            "worker gpu",
            (f"{_GPU}sm_active_ratio", "multiprocessors"),
            (f"{_GPU}dram_active_ratio", "memory bandwidth"),
            how="max",
        ),
        description="Prefill is bound by the former, decode by the latter. Hopper and later.",
    ),
    chart(
        "GPUs: memory in use",
        "percentunit",
        ratio(gauge, f"{_GPU}memory_used_bytes", f"{_GPU}memory_total_bytes", "worker"),
    ),
    chart("GPUs: power", "watt", *gauges("worker gpu", f"{_GPU}power_watts", how="max")),
)

FLEET = Dashboard(
    "kvasir-fleet",
    "Kvasir: fleet and SLO",
    "Whether promises are kept, what is missed and why, and what the fleet does.",
    (
        PanelRow("Promises", _PROMISES),
        PanelRow("Traffic", _TRAFFIC),
        PanelRow("Workers", _WORKERS),
        PanelRow("GPUs", _GPUS),
    ),
    (MODELS, POOLS, TENANTS),
)

_DECISIONS = (
    chart(
        "Duration of a decision",
        "s",
        (quantile(0.5, "kvasir_decision_seconds"), "p50"),
        (quantile(0.99, "kvasir_decision_seconds"), "p99"),
    ),
    chart(
        "Regret a second, by cause",
        "s",
        *rates("model cause", "kvasir_regret_seconds_total"),
        description="What other decisions would have saved, with hindsight.",
        stacked=True,
    ),
    chart(
        "Decisions that are regretted",
        "percentunit",
        ratio(rate, "kvasir_regretted_decisions_total", "kvasir_judged_decisions_total", "model"),
    ),
    chart(
        "Requests that were moved",
        "reqps",
        *rates(
            "model",
            ("kvasir_retries_total", "retried"),
            ("kvasir_migrations_total", "continued elsewhere"),
            ("kvasir_cross_role_requests_total", "run whole: a role is lost"),
        ),
    ),
)

_PREDICTIONS = (
    chart(
        "Cached tokens, predicted and found",
        "short",
        *rates(
            "model",
            ("kvasir_predicted_cached_tokens_total", "predicted"),
            ("kvasir_cached_tokens_total", "found"),
        ),
    ),
    chart(
        "Error of the prediction, mean",
        "percentunit",
        (mean("kvasir_cached_tokens_error_ratio", "model"), "{{model}}"),
    ),
    chart(
        "Workers whose cache the router does not know",
        "short",
        positive("worker state", "kvasir_worker_kv_state", state='!="exact"'),
    ),
    chart("Snapshots read", "short", *rates("worker", "kvasir_worker_kv_resyncs_total")),
)

_INDEX = (
    chart(
        "Blocks in the index",
        "short",
        *gauges(
            "",
            ("kvasir_index_blocks", "all"),
            ("kvasir_index_predicted_blocks", "predicted"),
            ("kvasir_index_names", "distinct"),
        ),
    ),
    chart("Memory of the index", "bytes", *gauges("", ("kvasir_index_bytes", "index"))),
    chart(
        "Predictions lost",
        "short",
        *rates(
            "",
            ("kvasir_index_expired_blocks_total", "expired"),
            ("kvasir_index_evicted_blocks_total", "evicted"),
        ),
    ),
    chart("Requests on each worker", "short", *gauges("worker", "kvasir_worker_in_flight")),
    chart(
        "Load that a worker may receive", "percentunit", *gauges("worker", "kvasir_worker_share", how="min")
    ),
    chart("Ejections", "short", *rates("worker", "kvasir_worker_ejections_total")),
)

ROUTING = Dashboard(
    "kvasir-routing",
    "Kvasir: routing",
    "How good routing decisions are, and what the router knows.",
    (
        PanelRow("Decisions", _DECISIONS),
        PanelRow("Predictions", _PREDICTIONS),
        PanelRow("Index and load", _INDEX),
    ),
    (MODELS, POOLS),
)
