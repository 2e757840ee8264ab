"""Errors as OpenAI's clients expect them: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import math

import msgspec

from kvasir.core.errors import CapacityError, KvasirError, RequestError
from kvasir.telemetry.reasons import http_status

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_type(status: int) -> str:
    """OpenAI's class of an error, by status."""
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


def error_status(error: Exception) -> int:
    """The HTTP status of any error; what Kvasir did not raise on purpose is 500."""
    return http_status(error) if isinstance(error, KvasirError) else 500


def error_body(error: Exception) -> bytes:
    """The JSON body. Errors that Kvasir did not raise on purpose say nothing of the inside."""
    if isinstance(error, KvasirError):
        message, code = error.message, error.code
    else:
        message, code = "Internal error; the log has the details under this request id.", "internal_error"
    param = error.param if isinstance(error, RequestError) else None
    detail = {"message": message, "type": error_type(error_status(error)), "param": param, "code": code}
    return msgspec.json.encode({"error": detail})


def error_headers(error: Exception) -> bytes:
    """Header lines that belong to an error: `retry-after` (whole seconds) for want of capacity."""
    if isinstance(error, CapacityError):
        return b"retry-after: %d\r\n" % max(1, math.ceil(error.retry_after_s))
    return b""
