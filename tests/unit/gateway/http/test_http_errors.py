"""Header lines of errors: Retry-After, whether to retry, and those that HTTP requires."""

from __future__ import annotations

import pytest

from kvasir.core.errors import CapacityError, ConfigError, KvasirError, RequestError, UpstreamError
from kvasir.telemetry.reasons import REASONS
from kvasir_platform.gateway.http.errors import _FINAL, MethodNotAllowed, error_headers, error_status


class Quota(RequestError):
    def __init__(self, retry_after_s: float) -> None:
        super().__init__("Too many.", status=429, code="rate_limit_requests")
        self.retry_after_s = retry_after_s


def fields(error: Exception) -> dict[str, str]:
    lines = error_headers(error).decode().split("\r\n")
    assert lines.pop() == ""
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize("make", [Quota, lambda s: CapacityError("full", retry_after_s=s)])
@pytest.mark.parametrize(
    ("wait_s", "seconds", "ms"),
    [(0.0, "1", "1"), (0.2, "1", "200"), (1.0, "1", "1000"), (2.001, "3", "2001"), (1e9, "3600", "3600000")],
)
def test_quotas_and_want_of_capacity_say_when_to_come_back(
    make: type[Quota], wait_s: float, seconds: str, ms: str
) -> None:
    error = make(wait_s)
    assert error_status(error) in {429, 503}
    assert fields(error) == {"retry-after": seconds, "retry-after-ms": ms}


def test_whatever_is_answered_with_503_says_when_to_come_back() -> None:
    gone = UpstreamError("cost.file costs.db: disk I/O error", code="costs_unavailable")
    assert fields(gone) == {"retry-after": "1", "retry-after-ms": "1000"}


def test_what_cannot_go_better_is_not_to_be_repeated() -> None:
    assert fields(ConfigError("broken")) == {"x-should-retry": "false"}
    assert fields(KvasirError("late", code="request_timeout")) == {"x-should-retry": "false"}
    assert fields(UpstreamError("died")) == {}


def test_codes_not_to_be_repeated_are_in_the_vocabulary_and_clients_would_repeat_them() -> None:
    assert {REASONS[code].status >= 500 or REASONS[code].status in {408, 409, 429} for code in _FINAL} == {
        True
    }


def test_a_missing_key_is_told_the_scheme_and_a_wrong_method_the_right_ones() -> None:
    assert fields(RequestError("who?", status=401)) == {"www-authenticate": 'Bearer realm="kvasir"'}
    assert fields(MethodNotAllowed("/v1/models", "GET")) == {"allow": "GET"}
    assert fields(ValueError("ours")) == {}
