"""Errors in Anthropic's format: `{"type": "error", "error": {type, message}, "request_id"}`.

Statuses are those of the OpenAI endpoints, so that proxies, metrics and alerts know one set: an overload is
503 with `overloaded_error`, and not Anthropic's 529, which HTTP does not define. Its clients decide by the
type, or by `retry-after`, and retry both. The stable code is in `error.details.error_code`.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from kvasir_platform.gateway.http.errors import ErrorFormat, error_status, shown_error

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TOO_LONG = "prompt is too long: "
"""Coding agents search for it in the message, and then compact their conversation."""


class MessagesErrorDetails(Struct):
    """The code, as docs/errors.md lists it."""

    error_code: str


class MessagesErrorDetail(Struct):
    """What is wrong."""

    type: str
    message: str
    details: MessagesErrorDetails


class MessagesError(Struct, tag_field="type", tag="error"):
    """The body of every error of the Messages API, and its event in a stream."""

    error: MessagesErrorDetail
    request_id: str


class AnthropicErrors:
    """Anthropic's `ErrorFormat`. Its clients read the request id from a header of their own."""

    def body(self, error: Exception, request_id: str) -> bytes:
        message, code = shown_error(error)
        if code == "context_length_exceeded":
            message = _TOO_LONG + message
        detail = MessagesErrorDetail(
            messages_error_type(error_status(error)), message, MessagesErrorDetails(code)
        )
        return msgspec.json.encode(MessagesError(detail, request_id))

    def event(self, error: Exception, request_id: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % self.body(error, request_id)

    def lines(self, request_id: str) -> bytes:
        return b"request-id: %b\r\n" % request_id.encode()


ANTHROPIC_ERRORS: ErrorFormat = AnthropicErrors()


def messages_error_type(status: int) -> str:
    """Return Anthropic's error type for an HTTP status."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
