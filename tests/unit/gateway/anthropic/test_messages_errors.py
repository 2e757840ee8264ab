"""Errors of the Messages API, and which requests get them."""

from __future__ import annotations

import json

import pytest
from tests.kit.gateway.api_answers import RecordingWire, received

from kvasir.core.errors import CapacityError, KvasirError, RequestError
from kvasir.telemetry.reasons import REASONS
from kvasir_platform.gateway.anthropic.endpoints import wants_anthropic, with_bearer
from kvasir_platform.gateway.anthropic.errors import ANTHROPIC_ERRORS, messages_error_type
from kvasir_platform.gateway.http.exchange import Exchange, HttpRequest

VERSION = {b"anthropic-version": b"2023-06-01"}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("bad", code="invalid_value"), 400, "invalid_request_error"),
        (RequestError("who", status=401, code="invalid_api_key"), 401, "authentication_error"),
        (RequestError("no", status=403, code="operator_only"), 403, "permission_error"),
        (RequestError("none", status=404, code="model_not_found"), 404, "not_found_error"),
        (RequestError("big", status=413, code="body_too_large"), 413, "request_too_large"),
        (RequestError("many", status=429, code="rate_limit_requests"), 429, "rate_limit_error"),
        (CapacityError("full", code="queue_full"), 503, "overloaded_error"),
        (KvasirError("late", code="request_timeout"), 504, "timeout_error"),
        (KvasirError("lost", code="worker_lost"), 502, "api_error"),
        (ValueError("a secret"), 500, "api_error"),
    ],
)
def test_an_error_has_the_type_of_its_status(error: Exception, status: int, kind: str) -> None:
    wire = RecordingWire()
    request = HttpRequest("POST", "/v1/messages", {}, b"", keep_alive=True, chunked=True)
    Exchange(request, "req-1", 0.0, wire, ANTHROPIC_ERRORS).fail(error)
    answer = received(wire.sent)
    assert answer.status == status
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "req-1"
    assert answer.json["type"] == "error"
    assert answer.json["error"]["type"] == kind
    assert answer.json["request_id"] == "req-1"
    assert "secret" not in wire.sent.decode()
    code = error.code if isinstance(error, KvasirError) else "internal_error"
    assert answer.json["error"]["details"] == {"error_code": code}


def test_an_error_in_a_stream_is_an_event() -> None:
    event = ANTHROPIC_ERRORS.event(CapacityError("full"), "r").decode()
    first, second, *rest = event.split("\n")
    assert first == "event: error"
    assert json.loads(second.removeprefix("data: "))["error"]["type"] == "overloaded_error"
    assert rest == ["", ""]


def test_agents_read_that_a_prompt_is_too_long() -> None:
    error = RequestError("The model's context is 8 tokens.", code="context_length_exceeded")
    message = json.loads(ANTHROPIC_ERRORS.body(error, "r"))["error"]["message"]
    assert message.startswith("prompt is too long: ")


def test_every_status_has_a_type() -> None:
    for status in {reason.status for reason in REASONS.values()} - {0}:
        assert messages_error_type(status).endswith(("_error", "_too_large"))


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/v1/messages", (True, True)),
        ("/v1/messages/count_tokens", (True, True)),
        ("/v1/messages/batches", (True, True)),
        ("/v1/messagesx", (False, False)),
        ("/v1/models", (False, True)),
        ("/v1/models/m", (False, True)),
        ("/v1/chat/completions", (False, False)),
        ("", (False, False)),
    ],
)
def test_the_path_or_the_header_of_its_clients_tells_the_api(path: str, wanted: tuple[bool, bool]) -> None:
    assert (wants_anthropic(path, {}), wants_anthropic(path, VERSION)) == wanted


def test_an_api_key_is_a_bearer_token_unless_there_is_one() -> None:
    assert with_bearer({b"x-api-key": b"k"})[b"authorization"] == b"Bearer k"
    both = {b"x-api-key": b"k", b"authorization": b"Bearer t"}
    assert with_bearer(both) == both
    assert with_bearer({}) == {}
