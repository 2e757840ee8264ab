"""The requests that ended last are kept in order, and their columns say what the requests say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.requests import Usage
from kvasir.ports.router import EndedRequests, RequestSummary


def summary(number: int, lasted_s: int, prompt: int) -> RequestSummary:
    finished_s = float(100 * number)
    usage = Usage(prompt_tokens=prompt, cached_tokens=prompt // 2)
    return RequestSummary(f"r{number}", "m", "ok", finished_s - lasted_s, finished_s, usage=usage)


@given(st.integers(0, 4), st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=10))
def test_the_newest_requests_and_their_columns_are_those_of_a_list(
    capacity: int, told: list[tuple[int, int]]
) -> None:
    every = [summary(number, *figures) for number, figures in enumerate(told)]
    kept = EndedRequests(capacity)
    for each in every:
        kept.add(each)
    newest = every[max(0, len(every) - capacity) :]
    assert list(kept) == [kept[row] for row in range(len(kept))] == newest
    assert kept[-2:] == newest[-2:]
    assert kept.column("finished_s").tolist() == [each.finished_s for each in newest]
    assert kept.column("lasted_s").tolist() == [each.finished_s - each.arrival_s for each in newest]
    assert kept.column("prompt_tokens").tolist() == [each.usage.prompt_tokens for each in newest]
    assert kept.column("cached_tokens").tolist() == [each.usage.cached_tokens for each in newest]
    assert list(EndedRequests.of(every)) == every


@pytest.mark.parametrize("row", [-2, 1])
def test_there_is_no_request_beyond_the_kept_ones(row: int) -> None:
    kept = EndedRequests.of([summary(0, 1, 1)])
    with pytest.raises(IndexError):
        _ = kept[row]
