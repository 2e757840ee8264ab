"""The requests that ended last are kept in order, and their columns say what the requests say."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.requests import RouteArm, SloClass, Usage
from kvasir.ports.router import EndedRequests, LostAttempt, RequestSummary
from kvasir.ports.routing import CROSS_ROLE
from kvasir.ports.views.ended import EndedColumn


def summary(number: int, lasted_s: int, prompt: int) -> RequestSummary:
    finished_s = float(100 * number)
    usage = Usage(prompt_tokens=prompt, cached_tokens=prompt // 2)
    return RequestSummary(
        f"r{number}",
        "m",
        "ok",
        finished_s - lasted_s,
        finished_s,
        first_token_s=finished_s - lasted_s / 2,
        reason=CROSS_ROLE if prompt % 2 else "",
        usage=usage,
    )


@given(st.integers(0, 4), st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=10))
def test_the_newest_requests_and_their_columns_are_those_of_a_list(
    capacity: int, told: list[tuple[int, int]]
) -> None:
    every = [summary(number, *figures) for number, figures in enumerate(told)]
    kept = EndedRequests(capacity)
    for begin in range(0, len(every), 3):
        kept.add(every[begin : begin + 3])
    newest = every[max(0, len(every) - capacity) :]
    assert list(kept) == [kept[row] for row in range(len(kept))] == newest
    assert kept[-2:] == newest[-2:]
    assert kept.column("finished_s").tolist() == [each.finished_s for each in newest]
    assert kept.column("lasted_s").tolist() == [each.finished_s - each.arrival_s for each in newest]
    assert kept.column("prompt_tokens").tolist() == [each.usage.prompt_tokens for each in newest]
    assert kept.column("cached_tokens").tolist() == [each.usage.cached_tokens for each in newest]
    assert kept.column("slo_met").tolist() == [float(bool(each.slo_met)) for each in newest]
    assert kept.column("cross_role").tolist() == [each.reason == CROSS_ROLE for each in newest]
    assert kept.column("answered").tolist() == [1.0] * len(newest)
    assert kept.column("ttft_s").tolist() == [each.ttft_s for each in newest]
    assert list(EndedRequests.of(every)) == every


@given(
    st.lists(
        st.builds(
            RequestSummary,
            st.just("r"),
            st.just("m"),
            st.sampled_from(("ok", "worker_lost", "client_closed", "content_filter")),
            st.just(1.0),
            st.sampled_from((2.0, 3.0)),
            first_token_s=st.sampled_from((None, 1.0, 1.5, 2.0)),
            usage=st.builds(Usage, output_tokens=st.integers(0, 3)),
            slo=st.builds(
                SloClass, st.just("s"), st.sampled_from((0.25, 0.5, 1.0)), st.sampled_from((0.5, 1.0))
            ),
        ),
        max_size=8,
    )
)
def test_columns_are_what_each_request_says_however_it_ended(every: list[RequestSummary]) -> None:
    kept = EndedRequests.of(every)
    nan = float("nan")
    said: dict[EndedColumn, list[float | None]] = {
        "ttft_s": [each.ttft_s for each in every],
        "itl_s": [each.itl_s for each in every],
        "slo_met": [each.slo_met for each in every],
        "answered": [each.outcome == "ok" for each in every],
    }
    for name, values in said.items():
        expected = [nan if each is None else float(each) for each in values]
        assert np.array_equal(kept.column(name), expected, equal_nan=True), name


USAGE = Usage(2**40, 7, 3, 2**63, 11, 5)
AWKWARD = [
    summary(0, 1, 1),
    RequestSummary("", "", "", 0.0, -0.0),
    RequestSummary(
        "größe-名前-🙂",
        "m" * 10_000,
        "worker_lost",
        1e300,
        float("inf"),
        routed_s=5e-324,
        prefill_done_s=0.1 + 0.2,
        first_token_s=3.0,
        transfer_s=1.0,
        prefill_worker="",
        decode_worker="w\x00\n",
        usage=USAGE,
        slo=SloClass("eilig ß", 0.25, 1e-9),
        refused=True,
        route_arm=RouteArm("route", "arm ü"),
        lost=(LostAttempt(None, "w", 1.0, 2.0, 3), LostAttempt("p", "d", 0.0, 0.5, 0, 2)),
    ),
]


@pytest.mark.parametrize("ended", AWKWARD, ids=["plain", "empty", "large"])
def test_a_request_is_read_as_it_was_added(ended: RequestSummary) -> None:
    kept = EndedRequests.of([summary(1, 1, 1), ended, summary(2, 1, 1)])
    assert kept[1] == ended
    assert kept[1].slo_met == ended.slo_met
    assert (type(kept[1].route_arm), type(kept[1].lost)) == (type(ended.route_arm), tuple)
    assert kept.find(ended.request_id) == 1


def test_times_of_tokens_are_kept_and_unknown_without_tokens() -> None:
    ended = summary(1, 1, 1)
    several = replace(ended, usage=Usage(output_tokens=3))
    failed = replace(ended, outcome="worker_lost", first_token_s=None)
    kept = EndedRequests.of([ended, several, failed])
    assert kept.column("answered").tolist() == [1.0, 1.0, 0.0]
    assert kept.column("ttft_s")[:2].tolist() == [0.5, 0.5]
    assert kept.column("itl_s").item(1) == 0.25
    assert np.isnan(kept.column("ttft_s")).tolist() == [False, False, True]
    assert np.isnan(kept.column("itl_s")).tolist() == [True, False, True]


def test_an_end_by_the_client_is_not_judged() -> None:
    kept = EndedRequests.of([replace(summary(0, 1, 1), outcome="client_closed"), summary(1, 1, 1)])
    assert np.isnan(kept.column("slo_met")).tolist() == [True, False]


def test_what_is_kept_beside_a_request_is_read_with_it() -> None:
    kept = EndedRequests(2)
    kept.add([summary(number, 1, 1) for number in range(3)], ["a", None, ["c", 3]], [b"x", b"y", b"y"])
    found = [kept.beside(row) for row in range(2)]
    assert [(msgspec.msgpack.decode(value), shared) for value, shared in found] == [
        (None, b"y"),
        (["c", 3], b"y"),
    ]


@pytest.mark.parametrize("row", [-2, 1])
def test_there_is_no_request_beyond_the_kept_ones(row: int) -> None:
    kept = EndedRequests.of([summary(0, 1, 1)])
    with pytest.raises(IndexError):
        _ = kept[row]
