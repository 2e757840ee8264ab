"""The closed vocabulary of outcomes: every code that a client, a metric or a log line can carry.

Clients branch on codes and dashboards group by them, so a code is never invented in passing: it stands
here with its HTTP status, its meaning and what to do, and docs/errors.md prints this table. Run
`make pages` after a change; this module's own program passes a page on with its table made anew.
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
    """One code. `status` is the HTTP status, or 0 where it is no error's answer: none can be sent any more,
    or one has been."""

    code: str
    status: int
    meaning: str
    remedy: str


_TABLE = (
    Reason("invalid_json", 400, "The body is not valid JSON, or not UTF-8.", "Send one JSON object."),
    Reason("invalid_type", 400, "A field has the wrong type.", "Send the type that the message names."),
    Reason("invalid_value", 400, "A field's value is out of range or makes no sense.", "See `param`."),
    Reason("missing_parameter", 400, "A required field is missing.", "Add the field in `param`."),
    Reason("unknown_parameter", 400, "The API has no such field.", "Remove the field in `param`."),
    Reason(
        "unsupported_parameter", 400, "The field exists, and this server does not serve it.", "Leave it out."
    ),
    Reason("unsupported_modality", 400, "Images, audio, video or files were sent.", "Send text only."),
    Reason(
        "unsupported_task",
        400,
        "The model does other work: it generates text, or makes embeddings.",
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
        "More output is asked for than the tenant may have in one request.",
        "Lower max_tokens; the message has the limit.",
    ),
    Reason(
        "token_limit_too_small",
        400,
        "The request alone may use more tokens than the tenant has a minute, so that no waiting helps.",
        "Shorten the prompt, or lower max_tokens or n.",
    ),
    Reason(
        "unknown_slo_class",
        400,
        "The header x-kvasir-slo names no class of this deployment.",
        "Name one that the message lists, or leave the header out.",
    ),
    Reason("invalid_request", 400, "The request cannot be served as sent.", "Read the message."),
    Reason("malformed_http", 400, "The bytes are not well-formed HTTP/1.1.", "Fix the client or the proxy."),
    Reason("missing_host", 400, "No Host header, or more than one.", "Send exactly one Host header."),
    Reason("invalid_api_key", 401, "The API key is missing or unknown.", "Send `Authorization: Bearer KEY`."),
    Reason(
        "api_key_expired", 401, "The API key was good until its expiry.", "Use another key of your tenant."
    ),
    Reason(
        "operator_only",
        403,
        "The path shows or steers the whole deployment.",
        "Use a key of a tenant with `operator: true`.",
    ),
    Reason(
        "origin_not_allowed",
        403,
        "A browser sent this for a page of an origin that may not call the API.",
        "List the page's origin in gateway.cors.origins.",
    ),
    Reason("model_not_found", 404, "No such model or adapter here.", "Ask GET /v1/models for the names."),
    Reason("not_found", 404, "No such path.", "See the API documentation."),
    Reason(
        "decision_not_found",
        404,
        "No decision is kept for this request id.",
        "Check the id; only the newest decisions are kept, as the message says.",
    ),
    Reason(
        "worker_not_found",
        404,
        "The router knows no such worker.",
        "Name one that the message lists; `kvasir get workers` shows them.",
    ),
    Reason("method_not_allowed", 405, "The path does not take this method.", "See the `Allow` header."),
    Reason("header_timeout", 408, "The request's headers came too slowly.", "Send them at once."),
    Reason("body_timeout", 408, "The request's body came too slowly.", "Send it faster or make it smaller."),
    Reason("request_too_large", 413, "The request exceeds what a worker takes.", "Send less."),
    Reason("body_too_large", 413, "The body exceeds the limit.", "Send less; the message has the limit."),
    Reason("target_too_long", 414, "Path and query exceed the limit.", "Send what it is about in the body."),
    Reason(
        "unsupported_media_type",
        415,
        "The body is not plain JSON.",
        "Send Content-Type: application/json, not compressed.",
    ),
    Reason("expectation_failed", 417, "Expect asks for more than 100-continue.", "Drop the header."),
    Reason(
        "rate_limit_requests",
        429,
        "The tenant has had its requests of this minute.",
        "Retry after `Retry-After` seconds; the x-ratelimit headers show what is left.",
    ),
    Reason(
        "rate_limit_tokens",
        429,
        "The tenant has had its tokens of this minute, or the request needs more than are left.",
        "Retry after `Retry-After` seconds, or lower max_tokens: a request is charged all that it may use.",
    ),
    Reason(
        "concurrency_limit",
        429,
        "The tenant has as many requests running as it may.",
        "Wait for one of them to end, then retry.",
    ),
    Reason(
        "too_many_client_connections",
        429,
        "The gateway holds all connections it may of one address.",
        "Reuse connections; a proxy's address goes into gateway.trusted_proxies.",
    ),
    Reason("headers_too_large", 431, "The headers exceed the limit.", "Send fewer or shorter headers."),
    Reason("internal_error", 500, "A fault in Kvasir itself.", "Retry; report it with the request id."),
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
        "The worker went away, and the stream could not go on elsewhere.",
        "Retry; the message says why.",
    ),
    Reason("session_lost", 502, "The connection to the worker ended before the request was sent.", "Retry."),
    Reason("worker_draining", 503, "The worker drains and takes nothing new.", "Retry."),
    Reason("worker_overloaded", 503, "The worker holds all the requests it may.", "Retry shortly."),
    Reason("transfer_failed", 502, "The KV cache did not reach the decode worker.", "Retry."),
    Reason("protocol_error", 502, "A worker broke the session's contract.", "Retry; update the workers."),
    Reason("registration_refused", 502, "A worker does not fit the deployment.", "See `kvasir status`."),
    Reason("config_error", 500, "The deployment cannot work as written.", "Run `kvasir check`."),
    Reason("start_failed", 500, "A process of the deployment did not come up.", "Read its log."),
    Reason("no_capacity", 503, "There is no room for the request.", "Retry after `Retry-After` seconds."),
    Reason("no_workers", 503, "No worker can take the request.", "Retry; see /health/ready."),
    Reason("queue_full", 503, "The queue for workers is full.", "Retry after `Retry-After` seconds."),
    Reason(
        "tenant_queue_full",
        429,
        "Your tenant has as many requests in the queue as it may.",
        "Send fewer at the same time; retry after `Retry-After` seconds.",
    ),
    Reason(
        "tenant_over_share",
        429,
        "Your tenant's requests fill its share; this one would wait too long behind them.",
        "Send fewer at the same time; retry after `Retry-After` seconds.",
    ),
    Reason(
        "wait_too_long",
        503,
        "The wait for a worker would be longer than the SLO class allows.",
        "Retry after `Retry-After` seconds, or name a class that allows more.",
    ),
    Reason(
        "deadline_unreachable",
        503,
        "The request could not begin before its deadline.",
        "Retry after `Retry-After` seconds, or with a later deadline.",
    ),
    Reason(
        "shed",
        503,
        "Under pressure, requests of this priority class are refused.",
        "Retry after `Retry-After` seconds.",
    ),
    Reason("queue_timeout", 503, "No worker was free in time.", "Retry after `Retry-After` seconds."),
    Reason("too_many_connections", 503, "The gateway holds all connections it may.", "Retry; reuse them."),
    Reason("bodies_full", 503, "The gateway holds all request bodies it may.", "Retry shortly."),
    Reason("tokenizer_busy", 503, "Too many long prompts wait to be tokenized.", "Retry shortly."),
    Reason("not_ready", 503, "The deployment is not ready to serve.", "Wait for /health/ready."),
    Reason(
        "router_lost", 503, "The router's core process ended, and every stream with it.", "Retry shortly."
    ),
    Reason(
        "edge_overloaded",
        503,
        "The gateway's process could not take what the workers sent; its streams were cut.",
        "Retry; give the router more CPUs.",
    ),
    Reason("shutting_down", 503, "The server is stopping.", "Retry: another replica or the next start."),
    Reason("request_timeout", 504, "The request ran longer than allowed.", "Ask for less output, or retry."),
    Reason(
        "drain_timeout",
        504,
        "A worker was not drained, or back in service, in the time that `kvasir drain` waited.",
        "Run it again to wait on; the worker goes on draining.",
    ),
    Reason(
        "http_version_not_supported", 505, "The request is not of HTTP/1.1 or HTTP/1.0.", "Speak HTTP/1.1."
    ),
    Reason(CLIENT_CLOSED, 0, "The client closed the connection; the request was aborted.", "Nothing."),
    Reason(TLS_FAILED, 0, "A TLS handshake failed or was too slow.", "Speak TLS 1.2 or newer."),
    Reason(SLOW_READER, 0, "The client read too slowly; its stream was cut.", "Read faster."),
    Reason(
        CONTENT_FILTER,
        0,
        "An output filter ended the answer, whose finish_reason says so.",
        "Ask for something else; the operator knows the filters.",
    ),
)

REASONS: Mapping[str, Reason] = MappingProxyType({reason.code: reason for reason in _TABLE})

_STATUS_OF_CLASS: tuple[tuple[type[KvasirError], int], ...] = (
    (CapacityError, 503),
    (UpstreamError, 502),
    (TransferError, 502),
)


def http_status(error: KvasirError) -> int:
    """The status to answer with: the error's own, its code's, or its class's."""
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
    """`code` if it is in the vocabulary, else `other`: labels stay few whatever a worker sends."""
    return code if code == OK or code in REASONS else OTHER


def markdown_table() -> str:
    """The table as docs/errors.md shows it."""
    rows = ["| status | code | meaning | what to do |", "|---|---|---|---|"]
    rows += [f"| {r.status or '–'} | `{r.code}` | {r.meaning} | {r.remedy} |" for r in _TABLE]
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """`page` with its table of errors made anew. Raises ValueError where it has none."""
    lines = page.splitlines(keepends=True)
    head = markdown_table().splitlines(keepends=True)[0]
    begin = lines.index(head)
    end = next((at for at in range(begin, len(lines)) if not lines[at].startswith("|")), len(lines))
    return "".join((*lines[:begin], markdown_table(), *lines[end:]))


if __name__ == "__main__":
    sys.stdout.write(with_table(sys.stdin.read()))
