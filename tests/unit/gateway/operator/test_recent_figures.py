"""The figures of the last minute are those of the requests that were answered in it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kvasir.core.requests import Usage
from kvasir.ports.router import EndedRequests, RequestSummary
from kvasir_platform.gateway.operator.facts.recent_figures import recent_requests

KEPT = 1000
NOW = 1000.0
ENDED = RequestSummary(
    "r", "m", "ok", arrival_s=990.0, first_token_s=991.0, finished_s=995.0,
    usage=Usage(prompt_tokens=100, cached_tokens=25, output_tokens=5),
)  # fmt: skip


def with_ttft(ttft_s: float) -> RequestSummary:
    """A request with an ITL of a tenth of its TTFT."""
    first = ENDED.arrival_s + ttft_s
    return replace(ENDED, first_token_s=first, finished_s=first + 4 * ttft_s / 10)


def test_medians_and_percentiles_are_those_of_all_models() -> None:
    ttfts = [number / 100 for number in range(1, 101)]
    halves = [EndedRequests.of(map(with_ttft, ttfts[half::2])) for half in (0, 1)]
    found = recent_requests(halves, NOW, KEPT)
    assert found is not None
    assert (found.over_s, found.answered) == (60.0, 100)
    assert msgspec.json.decode(msgspec.json.encode(found))["answered"] == 100
    assert (found.ttft_s, found.ttft_p95_s) == (0.5, 0.95)
    assert found.itl_s == pytest.approx(0.05)
    assert found.itl_p95_s == pytest.approx(0.095)
    assert found.hit_rate == 0.25


def test_earlier_requests_and_those_that_failed_do_not_count() -> None:
    earlier = replace(with_ttft(9.0), finished_s=NOW - 60.5)
    failed = replace(with_ttft(9.0), outcome="worker_lost", usage=Usage(prompt_tokens=900))
    found = recent_requests([EndedRequests.of([earlier, failed, ENDED])], NOW, KEPT)
    assert found is not None
    assert (found.answered, found.ttft_p95_s, found.hit_rate) == (1, 1.0, 0.25)


def test_more_requests_in_a_minute_than_are_kept_are_figures_of_a_shorter_time() -> None:
    busy = EndedRequests(4)
    busy.add([replace(ENDED, finished_s=NOW - age) for age in (9.0, 8.0, 7.0, 6.0, 5.0)])
    calm = EndedRequests(4)
    calm.add([replace(ENDED, finished_s=NOW - age) for age in (30.0, 2.0)])
    found = recent_requests([busy, calm], NOW, 4)
    assert found is not None
    assert (found.over_s, found.answered) == (8.0, 5)


def test_what_no_request_has_is_unknown() -> None:
    silent = replace(ENDED, first_token_s=None, usage=Usage())
    nothing = (None, None, None, None, None)
    for ended, count in (([], 0), ([EndedRequests(KEPT)], 0), ([EndedRequests.of([silent])], 1)):
        found = recent_requests(ended, NOW, KEPT)
        assert found is not None
        assert (found.over_s, found.answered) == (60.0, count)
        known = (found.ttft_s, found.ttft_p95_s, found.itl_s, found.itl_p95_s, found.hit_rate)
        assert known == nothing


def test_nothing_is_said_where_no_requests_are_kept() -> None:
    assert recent_requests([EndedRequests(0)], NOW, 0) is None
