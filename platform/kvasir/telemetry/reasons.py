"""The closed vocabulary of outcomes: every code that a client, a metric or a log line can carry.

Clients branch on codes and dashboards group by them, so every code is defined here with its HTTP status, its
meaning and its remedy. docs/errors.md has this table. Run `make pages` after a change; as a program, this
module copies a page from stdin to stdout with the table updated.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvasir.core.errors import CapacityError, KvasirError, RequestError, TransferError, UpstreamError

OK = "ok"
CLIENT_CLOSED = "client_closed"
SLOW_READER = "slow_reader"
TLS_FAILED = "tls_failed"
CONTENT_FILTER = "content_filter"
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Reason:
    """One code. `status` is the HTTP status, or 0 for an outcome without an error response: none can be sent,
    or a response was already started."""

    code: str
    status: int
    meaning: str
    remedy: str


_TABLE = (
    Reason("invalid_json", 400, "The body is not valid JSON, or not UTF-8.", "Send one JSON object."),
    Reason("invalid_type", 400, "A field has the wrong type.", "Send the type that the message names."),
    Reason("invalid_value", 400, "The value of a field is out of range or invalid.", "See `param`."),
    Reason("missing_parameter", 400, "A required field is missing.", "Add the field in `param`."),
    Reason("unknown_parameter", 400, "The API has no such field.", "Remove the field in `param`."),
    Reason(
        "unsupported_parameter",
        400,
        "The API has the field, but this server does not support it.",
        "Remove it.",
    ),
    Reason("unsupported_modality", 400, "Images, audio, video or files were sent.", "Send text only."),
    Reason(
        "unsupported_task",
        400,
        "The model does not support the task: generation, or embeddings.",
        "Use the path or the model that the message names.",
    ),
    Reason(
        "context_length_exceeded",
        400,
        "Prompt and output together exceed the model's context.",
        "Shorten the prompt or lower max_tokens; the message has the numbers.",
    ),
    Reason(
        "output_limit_exceeded",
        400,
        "The requested output exceeds the limit of the tenant for one request.",
        "Lower max_tokens; the message has the limit.",
    ),
    Reason(
        "token_limit_too_small",
        400,
        "The request can use more tokens than the tenant's limit per minute, so a retry cannot succeed.",
        "Shorten the prompt, or lower max_tokens or n.",
    ),
    Reason(
        "body_too_complex",
        400,
        "The body has too many arrays and objects, or values.",
        "Send fewer; the message has the limit.",
    ),
    Reason(
        "grammar_too_costly",
        400,
        "The schema, pattern or grammar of the output can be matched in too many ways, or takes too long.",
        "Do not repeat what is optional or repeated already; separate repeated parts by a delimiter.",
    ),
    Reason(
        "previous_response_not_found",
        400,
        "There is no stored response of the id in previous_response_id.",
        "Send the whole conversation as input; the message says how long responses are stored.",
    ),
    Reason(
        "unknown_slo_class",
        400,
        "The header x-kvasir-slo names an unknown SLO class.",
        "Use one that the message lists, or omit the header.",
    ),
    Reason(
        "adapter_unreadable",
        400,
        "Files of a LoRA adapter are missing, truncated or not in PEFT's format with safetensors.",
        "See the message; name a source that every worker of the model can read.",
    ),
    Reason(
        "adapter_too_large",
        400,
        "The files of a LoRA adapter are larger than lora_loading.max_bytes.",
        "Raise it, or train a smaller adapter.",
    ),
    Reason(
        "adapter_rank_too_large",
        400,
        "The rank of a LoRA adapter is larger than lora_loading.max_rank.",
        "Raise it and restart the pools, or train an adapter of lower rank.",
    ),
    Reason(
        "adapter_base_mismatch",
        400,
        "A LoRA adapter does not fit the shapes of the model.",
        "Load it for the model that it was trained on.",
    ),
    Reason("adapter_refused", 400, "The engine does not accept a LoRA adapter.", "See the engine's message."),
    Reason("invalid_request", 400, "The request cannot be served as sent.", "Read the message."),
    Reason("malformed_http", 400, "The bytes are not well-formed HTTP/1.1.", "Fix the client or the proxy."),
    Reason("missing_host", 400, "No Host header, or more than one.", "Send exactly one Host header."),
    Reason("invalid_api_key", 401, "The API key is missing or unknown.", "Send `Authorization: Bearer KEY`."),
    Reason("api_key_expired", 401, "The API key has expired.", "Use another key of your tenant."),
    Reason(
        "invalid_token",
        401,
        "The token does not verify, or is not for this deployment.",
        "Get a token of the issuer for this audience; the message says what does not fit.",
    ),
    Reason("token_expired", 401, "The token has expired.", "Get another one from its issuer."),
    Reason(
        "no_tenant",
        403,
        "The token is valid, and its claims name no tenant of the deployment.",
        "Ask the operator to map a claim of yours in gateway.token_issuers.",
    ),
    Reason(
        "insufficient_scope",
        403,
        "The scopes of the API key or the token do not cover the path.",
        "Use another key or token; the message has the scopes.",
    ),
    Reason(
        "operator_only",
        403,
        "The path is for operators of the deployment.",
        "Use a key of a tenant with `operator: true`.",
    ),
    Reason(
        "adapter_loading_disabled",
        403,
        "LoRA adapters cannot be loaded while the deployment runs.",
        "List the allowed sources in lora_loading.allow and start the deployment anew.",
    ),
    Reason(
        "adapter_source_not_allowed",
        403,
        "The source of a LoRA adapter is not in the allow-list.",
        "Add it, or a prefix of it, to lora_loading.allow.",
    ),
    Reason(
        "origin_not_allowed",
        403,
        "The origin of the web page is not allowed to call the API.",
        "List the page's origin in gateway.cors.origins.",
    ),
    Reason("model_not_found", 404, "No such model or adapter.", "See GET /v1/models for the names."),
    Reason("file_not_found", 404, "The tenant has no file of this id.", "See GET /v1/files."),
    Reason("batch_not_found", 404, "The tenant has no batch of this id.", "See GET /v1/batches."),
    Reason(
        "batches_disabled",
        404,
        "The server keeps no files and runs no batches.",
        "Set gateway.batches.storage.",
    ),
    Reason("file_in_use", 409, "A batch that has not ended reads the file.", "Cancel the batch first."),
    Reason(
        "file_limit",
        400,
        "The upload exceeds gateway.batches.max_files or max_bytes of the tenant.",
        "Delete files that are not needed.",
    ),
    Reason(
        "duplicate_custom_id",
        400,
        "Two lines of a batch have the same custom_id.",
        "Give each line its own.",
    ),
    Reason(
        "batch_limit",
        429,
        "The tenant has as many batches that have not ended as gateway.batches.max_batches.",
        "Wait for one to end, or cancel one.",
    ),
    Reason(
        "no_spare_capacity",
        503,
        "Other requests leave no capacity for a line of a batch.",
        "Nothing: it is sent again until the batch expires.",
    ),
    Reason(
        "storage_unavailable",
        503,
        "The storage of files and batches does not work, or too many calls wait for it.",
        "Check gateway.batches.storage: its space, rights and credentials.",
    ),
    Reason("not_found", 404, "No such path.", "See the API documentation."),
    Reason(
        "response_not_found",
        404,
        "There is no stored response of this id.",
        "Check the id; responses are stored in the router that made them, as the message says.",
    ),
    Reason(
        "costs_disabled",
        404,
        "Costs are not counted.",
        "Set `cost.enabled` to true in kvasir.yaml, and restart the routers.",
    ),
    Reason(
        "decision_not_found",
        404,
        "There is no record of a decision for this request id.",
        "Check the id; only the newest decisions are kept, as the message says.",
    ),
    Reason(
        "worker_not_found",
        404,
        "The router has no such worker.",
        "Use one that the message lists; `kvasir get workers` shows them.",
    ),
    Reason(
        "adapter_not_found",
        404,
        "No LoRA adapter of that name was loaded at run time.",
        "See `kvasir lora list`; adapters in `lora` of kvasir.yaml are removed there.",
    ),
    Reason("method_not_allowed", 405, "The path does not support this method.", "See the `Allow` header."),
    Reason("header_timeout", 408, "The request headers timed out.", "Send them at once."),
    Reason("body_timeout", 408, "The request body timed out.", "Send it faster or make it smaller."),
    Reason(
        "adapter_exists",
        409,
        "A model or a LoRA adapter has that name, or the adapter is being loaded or unloaded.",
        "Choose another name, or unload the adapter first.",
    ),
    Reason(
        "adapter_limit",
        409,
        "Workers hold as many LoRA adapters as lora_loading.max_adapters allows.",
        "Unload one, or raise the limit and restart the pools.",
    ),
    Reason(
        "adapter_changed",
        409,
        "A source has other files than those that other workers loaded from it.",
        "Unload the adapter and load it again.",
    ),
    Reason("request_too_large", 413, "The request exceeds the limit of a worker.", "Send less."),
    Reason("body_too_large", 413, "The body exceeds the limit.", "Send less; the message has the limit."),
    Reason("target_too_long", 414, "Path and query exceed the limit.", "Send the data in the body."),
    Reason(
        "unsupported_media_type",
        415,
        "The body is not plain JSON.",
        "Send Content-Type: application/json, not compressed.",
    ),
    Reason("expectation_failed", 417, "Expect has a value other than 100-continue.", "Remove the header."),
    Reason(
        "rate_limit_requests",
        429,
        "The tenant has used its requests per minute.",
        "Retry after `Retry-After` seconds; the x-ratelimit headers show the remaining amount.",
    ),
    Reason(
        "rate_limit_tokens",
        429,
        "The tenant has used its tokens per minute, or the request needs more than remain.",
        "Retry after `Retry-After` seconds, or lower max_tokens: a request is charged for its maximum.",
    ),
    Reason(
        "rate_limit_bytes",
        429,
        "The tenant has used its bytes of bodies per minute.",
        "Retry after `Retry-After` seconds, or send less.",
    ),
    Reason(
        "budget_exceeded",
        429,
        "The tenant has spent its hard budget of the day or month.",
        "Retry after `Retry-After` seconds, when the budget is renewed, or ask the operator to raise it.",
    ),
    Reason(
        "concurrency_limit",
        429,
        "The tenant has reached its limit of concurrent requests.",
        "Wait for one of them to end, then retry.",
    ),
    Reason(
        "background_limit",
        429,
        "The tenant has reached its limit of running background responses.",
        "Wait for one of them to end, or cancel one.",
    ),
    Reason(
        "too_many_client_connections",
        429,
        "The client address has reached its limit of connections.",
        "Reuse connections; add the address of a proxy to gateway.trusted_proxies.",
    ),
    Reason("headers_too_large", 431, "The headers exceed the limit.", "Send fewer or shorter headers."),
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
    Reason("session_lost", 502, "The connection to the worker ended before the request was sent.", "Retry."),
    Reason("worker_draining", 503, "The worker is draining and accepts no requests.", "Retry."),
    Reason("worker_overloaded", 503, "The worker has reached its limit of requests.", "Retry shortly."),
    Reason("transfer_failed", 502, "The KV cache did not reach the decode worker.", "Retry."),
    Reason("protocol_error", 502, "A worker violated the session protocol.", "Retry; update the workers."),
    Reason("registration_refused", 502, "A worker does not match the deployment.", "See `kvasir status`."),
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
    Reason(CLIENT_CLOSED, 0, "The client closed the connection; the request was aborted.", "Nothing."),
    Reason(TLS_FAILED, 0, "A TLS handshake failed or timed out.", "Use TLS 1.2 or newer."),
    Reason(SLOW_READER, 0, "The client read too slowly; its stream was aborted.", "Read faster."),
    Reason(
        CONTENT_FILTER,
        0,
        "An output filter ended the answer, whose finish_reason says so.",
        "Change the request; operators know the filters.",
    ),
)

REASONS: Mapping[str, Reason] = MappingProxyType({reason.code: reason for reason in _TABLE})

_STATUS_OF_CLASS: tuple[tuple[type[KvasirError], int], ...] = (
    (CapacityError, 503),
    (UpstreamError, 502),
    (TransferError, 502),
)


def http_status(error: KvasirError) -> int:
    """Return the HTTP status of an error: its own, that of its code, or that of its class."""
    if isinstance(error, RequestError):
        return error.status
    reason = REASONS.get(error.code)
    if reason is not None and reason.status:
        return reason.status
    for kind, status in _STATUS_OF_CLASS:
        if isinstance(error, kind):
            return status
    return 500


def outcome_label(code: str) -> str:
    """Return `code` if it is in the vocabulary, else `other`, so that label cardinality is bounded."""
    return code if code == OK or code in REASONS else OTHER


def markdown_table() -> str:
    """Return the table for docs/errors.md."""
    rows = ["| status | code | meaning | what to do |", "|---|---|---|---|"]
    rows += [f"| {r.status or '–'} | `{r.code}` | {r.meaning} | {r.remedy} |" for r in _TABLE]
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """Return `page` with its table of errors updated. Raises ValueError if it has none."""
    lines = page.splitlines(keepends=True)
    head = markdown_table().splitlines(keepends=True)[0]
    begin = lines.index(head)
    end = next((at for at in range(begin, len(lines)) if not lines[at].startswith("|")), len(lines))
    return "".join((*lines[:begin], markdown_table(), *lines[end:]))


if __name__ == "__main__":
    sys.stdout.write(with_table(sys.stdin.read()))
