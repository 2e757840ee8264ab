"""Codes of requests that exceed a limit: of sizes, or of what a tenant may use."""

from __future__ import annotations

from kvasir.telemetry.codes.reason import Reason

LIMIT_REASONS = (
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
        "Retry after `Retry-After` seconds, at most an hour, or ask the operator to raise the budget.",
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
)
