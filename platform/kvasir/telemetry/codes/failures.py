"""Codes of failures and of a lack of capacity, and of rollouts."""

from __future__ import annotations

from kvasir.telemetry.codes.reason import Reason

FAILURE_REASONS = (
    Reason("internal_error", 500, "An internal error of Kvasir.", "Retry; report it with the request id."),
    Reason("duplicate_request", 500, "A request id was used twice on a worker.", "Retry; report it."),
    Reason(
        "unsupported_transfer_encoding",
        501,
        "The body is in a transfer coding other than chunked.",
        "Send Transfer-Encoding: chunked, or a Content-Length.",
    ),
    Reason("worker_failed", 502, "The worker failed while it served the request.", "Retry."),
    Reason("engine_dead", 502, "The worker's engine died while it served the request.", "Retry."),
    Reason(
        "worker_lost",
        502,
        "The worker was lost, and failover of the stream failed.",
        "Retry; the message says why.",
    ),
    Reason(
        "cell_lost",
        502,
        "The cell of another region that ran the request was lost, and no other cell could continue it.",
        "Retry; the message says why.",
    ),
    Reason("session_lost", 502, "The connection to the worker ended before the request was sent.", "Retry."),
    Reason("worker_draining", 503, "The worker is draining and accepts no requests.", "Retry."),
    Reason("worker_overloaded", 503, "The worker has reached its limit of requests.", "Retry shortly."),
    Reason("transfer_failed", 502, "The KV cache did not reach the decode worker.", "Retry."),
    Reason("protocol_error", 502, "A worker violated the session protocol.", "Retry; update the workers."),
    Reason("config_error", 500, "The deployment cannot work as configured.", "Run `kvasir check`."),
    Reason("start_failed", 500, "A process of the deployment did not start.", "Read its log."),
    Reason(
        "adapter_source_unavailable",
        502,
        "A LoRA adapter could not be downloaded.",
        "See the message: the network, credentials, or a library that the workers lack.",
    ),
    Reason(
        "adapter_load_failed",
        502,
        "Some workers hold a LoRA adapter, and others failed to load it.",
        "See the message; they are asked again until the adapter is unloaded.",
    ),
    Reason(
        "adapter_unreachable",
        503,
        "A worker that holds the LoRA adapter cannot be reached, so that it cannot be unloaded.",
        "Retry when the worker is back or has left; see `kvasir get workers`.",
    ),
    Reason("no_capacity", 503, "There is no capacity for the request.", "Retry after `Retry-After` seconds."),
    Reason(
        "too_many_recordings",
        503,
        "The router is recorded by as many readers as it can have.",
        "End one; it is forgotten 30 s after its last call.",
    ),
    Reason(
        "no_workers",
        503,
        "No worker can take the request.",
        "Retry after `Retry-After` seconds; /status says what is missing.",
    ),
    Reason("queue_full", 503, "The queue for workers is full.", "Retry after `Retry-After` seconds."),
    Reason(
        "tenant_queue_full",
        429,
        "Your tenant has reached its limit of queued requests.",
        "Send fewer at the same time; retry after `Retry-After` seconds.",
    ),
    Reason(
        "tenant_over_share",
        429,
        "Your tenant uses its whole share of capacity, and the request would wait too long.",
        "Send fewer at the same time; retry after `Retry-After` seconds.",
    ),
    Reason(
        "wait_too_long",
        503,
        "The expected wait for a worker exceeds that of the SLO class.",
        "Retry after `Retry-After` seconds, or use an SLO class with a longer TTFT.",
    ),
    Reason(
        "deadline_unreachable",
        503,
        "The request cannot start before its deadline.",
        "Retry after `Retry-After` seconds, or with a later deadline.",
    ),
    Reason(
        "shed",
        503,
        "Brown-out: requests of this priority class are refused.",
        "Retry after `Retry-After` seconds.",
    ),
    Reason("queue_timeout", 503, "No worker was available in time.", "Retry after `Retry-After` seconds."),
    Reason(
        "too_many_connections", 503, "The gateway has reached its limit of connections.", "Retry; reuse them."
    ),
    Reason(
        "bodies_full", 503, "The gateway has reached its limit of buffered request bodies.", "Retry shortly."
    ),
    Reason("tokenizer_busy", 503, "Too many long prompts are queued for tokenization.", "Retry shortly."),
    Reason(
        "images_busy",
        503,
        "Images, videos and audio of other requests take `gateway.image_inputs.max_held_bytes`.",
        "Retry shortly.",
    ),
    Reason(
        "api_keys_unavailable",
        503,
        "The router has not read the API keys in Redis since it started.",
        "Retry after `Retry-After` seconds; the router's log says what is wrong.",
    ),
    Reason(
        "signing_keys_unavailable",
        503,
        "The signing keys of a token's issuer are being read, or cannot be read.",
        "Retry after `Retry-After` seconds; the router's log says what is wrong.",
    ),
    Reason("not_ready", 503, "The deployment is not ready to serve.", "Wait for /health/ready."),
    Reason(
        "router_lost", 503, "The router's core process ended, and every stream with it.", "Retry shortly."
    ),
    Reason(
        "edge_overloaded",
        503,
        "A gateway process could not keep up with the workers; its streams were aborted.",
        "Retry; give the router more CPUs.",
    ),
    Reason(
        "costs_unavailable",
        503,
        "The store of costs cannot be read.",
        "Retry; the router's log has the reason.",
    ),
    Reason("shutting_down", 503, "The server is stopping.", "Retry: another replica or the next start."),
    Reason("request_timeout", 504, "The request ran longer than allowed.", "Request less output, or retry."),
    Reason(
        "adapter_timeout",
        504,
        "A LoRA adapter was not loaded or unloaded within lora_loading.timeout_s.",
        "See `kvasir lora list`; the worker continues.",
    ),
    Reason(
        "drain_timeout",
        504,
        "A worker did not drain, or return to service, within the timeout of `kvasir drain`.",
        "Run it again to continue to wait; the worker continues to drain.",
    ),
    Reason("rollout_not_found", 404, "No route with a canary has this name.", "See `kvasir rollout status`."),
    Reason(
        "rollout_state",
        409,
        "The order does not apply to the phase that the rollout is in.",
        "See `kvasir rollout status`; the message names the phases that it applies to.",
    ),
    Reason(
        "rollouts_unavailable",
        502,
        "The Redis in which routers share rollouts does not answer, or other routers change the rollout.",
        "Try again; check tenancy.redis. Shares of canaries stay as they are meanwhile.",
    ),
    Reason("http_version_not_supported", 505, "The request is not HTTP/1.1 or HTTP/1.0.", "Use HTTP/1.1."),
)
