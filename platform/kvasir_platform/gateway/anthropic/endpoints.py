"""What the gateway knows of the Messages API before a body is read: its paths, its clients and their keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from kvasir_platform.gateway.anthropic.errors import ANTHROPIC_ERRORS
from kvasir_platform.gateway.http.errors import OPENAI_ERRORS, ErrorFormat

Admitted = TypeVar("Admitted")
Admission = Callable[[Mapping[bytes, bytes]], Admitted]
"""From a request's headers to what handles it."""

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
_MODELS = "/v1/models"
_VERSION = b"anthropic-version"
"""All clients send it. Its value selects nothing: there is one version of the API."""


def wants_anthropic(path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request is of this API: by its path or, for paths that OpenAI's API has too, by the
    header of its clients."""
    if path == MESSAGES or path.startswith(MESSAGES + "/"):
        return True
    return _VERSION in headers and (path == _MODELS or path.startswith(_MODELS + "/"))


def with_bearer(headers: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
    """Return `headers` with the API key in `x-api-key`, where Anthropic's clients send it, as a bearer token,
    unless they have an Authorization."""
    key = headers.get(b"x-api-key")
    if key is None or b"authorization" in headers:
        return headers
    return {**headers, b"authorization": b"Bearer " + key}


def error_format(path: str, headers: Mapping[bytes, bytes]) -> ErrorFormat:
    """Return the form of errors that the client of a request understands."""
    return ANTHROPIC_ERRORS if wants_anthropic(path, headers) else OPENAI_ERRORS


def either_key(admit: Admission[Admitted]) -> Admission[Admitted]:
    """Return a route that takes an API key from `x-api-key` too."""
    return lambda headers: admit(with_bearer(headers))
