"""Error responses in OpenAI's format, `{"error": {message, type, param, code}}`, or that of another API."""

from __future__ import annotations

import math
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta, Struct

from kvasir.core.errors import KvasirError, RequestError
from kvasir.telemetry.reasons import http_status

MAX_RETRY_AFTER_S = 3600.0
_RETRY_AFTER_S = 1.0
"""Delay of a 503 that names none, such as that of a store that does not answer."""

_FINAL = frozenset(
    (
        "adapter_exists",
        "adapter_limit",
        "adapter_load_failed",
        "adapter_timeout",
        "config_error",
        "drain_timeout",
        "file_in_use",
        "http_version_not_supported",
        "request_timeout",
        "unsupported_transfer_encoding",
    )
)
"""Codes whose status clients retry by default although a retry fails again or doubles an overload."""

_CHALLENGES = {
    "insufficient_scope": b', error="insufficient_scope"',
    "invalid_token": b', error="invalid_token"',
    "token_expired": b', error="invalid_token", error_description="expired"',
}
"""What `www-authenticate` adds for these codes, by RFC 6750."""

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorFormat(Protocol):
    """The form that one API gives to errors, and to what its clients read of every answer."""

    def body(self, error: Exception, request_id: str) -> bytes:
        """Return the JSON body. Errors other than KvasirError reveal no internal details."""
        ...

    def event(self, error: Exception, request_id: str) -> bytes:
        """Return the server-sent event that ends a stream."""
        ...

    def lines(self, request_id: str) -> bytes:
        """Return the header lines of every answer of the API, whole or streamed."""
        ...


class ErrorDetail(Struct):
    """What is wrong. `type` and `code` are enumerated in the OpenAPI document."""

    message: Annotated[str, Meta(description="Human-readable; may change. Match on `code` instead.")]
    type: str
    param: Annotated[str | None, Meta(description="The invalid field, as a path in the body.")]
    code: str


class ErrorResponse(Struct, forbid_unknown_fields=True):
    """The body of every error."""

    error: ErrorDetail


class MethodNotAllowed(RequestError):
    """The method is not allowed for the target. `allowed` is the value of the Allow header."""

    def __init__(self, target: str, allowed: str) -> None:
        super().__init__(f"{target} takes {allowed} only.", status=405, code="method_not_allowed")
        self.allowed = allowed


def error_type(status: int) -> str:
    """Return OpenAI's error type for an HTTP status."""
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


def error_status(error: Exception) -> int:
    """Return the HTTP status of an error; 500 for errors other than KvasirError."""
    return http_status(error) if isinstance(error, KvasirError) else 500


def shown_error(error: Exception) -> tuple[str, str]:
    """Return the message and the code for the client. Errors other than KvasirError reveal no internal
    details."""
    if isinstance(error, KvasirError):
        return error.message, error.code
    return "Internal error; the log has the details under this request id.", "internal_error"


def error_body(error: Exception) -> bytes:
    """Return the JSON body in OpenAI's format."""
    message, code = shown_error(error)
    param = error.param if isinstance(error, RequestError) else None
    detail = ErrorDetail(message, error_type(error_status(error)), param, code)
    return msgspec.json.encode(ErrorResponse(detail))


class OpenAiErrors:
    """OpenAI's `ErrorFormat`."""

    def body(self, error: Exception, request_id: str) -> bytes:
        return error_body(error)

    def event(self, error: Exception, request_id: str) -> bytes:
        return b"data: %b\n\n" % error_body(error)

    def lines(self, request_id: str) -> bytes:
        return b""


OPENAI_ERRORS: ErrorFormat = OpenAiErrors()


def error_headers(error: Exception) -> bytes:
    """Return the header lines of an error.

    `retry-after` (whole seconds, as HTTP requires) and `retry-after-ms` (which OpenAI's clients prefer) for
    errors with a retry delay, which are quotas (429) and lack of capacity (503), and for every other 503.
    `x-should-retry: false` if clients would retry the status although a retry cannot succeed.
    `www-authenticate` with 401 and a lacking scope, and `allow` with 405, as HTTP requires.
    """
    lines = b""
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is None and isinstance(error, KvasirError) and error_status(error) == 503:
        retry_after_s = _RETRY_AFTER_S
    if retry_after_s is not None:
        wait_s = min(max(float(retry_after_s), 0.001), MAX_RETRY_AFTER_S)
        lines = b"retry-after: %d\r\nretry-after-ms: %d\r\n" % (math.ceil(wait_s), math.ceil(wait_s * 1e3))
    lines += getattr(error, "header_lines", b"")
    if isinstance(error, KvasirError) and error.code in _FINAL:
        lines += b"x-should-retry: false\r\n"
    if isinstance(error, MethodNotAllowed):
        lines += b"allow: %b\r\n" % error.allowed.encode()
    elif isinstance(error, KvasirError) and (error_status(error) == 401 or error.code in _CHALLENGES):
        lines += b'www-authenticate: Bearer realm="kvasir"%b\r\n' % _CHALLENGES.get(error.code, b"")
    return lines
