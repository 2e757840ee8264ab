"""The phases of a request's timeline follow each other from its arrival to its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir.core.requests import Usage
from kvasir.ports.router import RequestSummary
from kvasir.ports.stores.costs import WorkSums
from kvasir_platform.gateway.openai.schema.operation import WorkerClaim
from kvasir_platform.gateway.operator.timelines import phases_of, timeline_of

APART = RequestSummary(
    "r",
    "m",
    "ok",
    arrival_s=100.0,
    routed_s=100.1,
    prefill_done_s=100.5,
    first_token_s=100.7,
    finished_s=102.0,
    prefill_worker="p-1",
    decode_worker="d-1",
    waited_s=0.05,
    tier_s=0.05,
    pulled_s=0.15,
    usage=Usage(prompt_tokens=90, cached_tokens=64, output_tokens=40),
)
WHOLE = replace(APART, prefill_worker=None, prefill_done_s=None, pulled_s=0.0)


def spans(summary: RequestSummary) -> list[tuple[str, float, float, str | None]]:
    return [(each.phase, each.start_s, each.end_s, each.worker) for each in phases_of(summary)]


def test_prefill_and_decode_apart_have_a_transfer_between_them() -> None:
    assert spans(APART) == [
        ("queue", 0.0, 0.1, None),
        ("engine_queue", 0.1, 0.15, "p-1"),
        ("tiers", 0.15, 0.2, "p-1"),
        ("prefill", 0.2, 0.5, "p-1"),
        ("transfer", 0.5, 0.65, "d-1"),
        ("decode", 0.65, 0.7, "d-1"),
        ("stream", 0.7, 2.0, "d-1"),
    ]


def test_a_request_on_one_worker_has_its_prompt_until_the_first_token() -> None:
    assert [(phase, end) for phase, _, end, _ in spans(WHOLE)] == [
        ("queue", 0.1), ("engine_queue", 0.15), ("tiers", 0.2), ("prefill", 0.7), ("stream", 2.0),
    ]  # fmt: skip
    assert {worker for *_, worker in spans(WHOLE)} == {None, "d-1"}


@pytest.mark.parametrize(
    "summary", [APART, WHOLE, replace(APART, waited_s=9.0), replace(APART, pulled_s=9.0)]
)
def test_phases_leave_no_gap_and_do_not_overlap(summary: RequestSummary) -> None:
    found = spans(summary)
    assert found[0][1] == 0.0
    assert [start for _, start, _, _ in found[1:]] == [end for _, _, end, _ in found[:-1]]
    assert found[-1][2] == 2.0


def test_a_request_is_shown_as_far_as_it_is() -> None:
    waiting = replace(APART, routed_s=None, prefill_done_s=None, first_token_s=None, finished_s=101.0)
    assert spans(waiting) == [("queue", 0.0, 1.0, None)]
    computing = replace(APART, prefill_done_s=None, first_token_s=None, waited_s=0.0, tier_s=0.0)
    assert spans(computing)[-1] == ("prefill", 0.1, 2.0, "p-1")
    shown = timeline_of(computing, "prefilling", 90, 0)
    assert (shown.outcome, shown.running, shown.slo_met, shown.prompt_tokens) == (
        None,
        "prefilling",
        None,
        90,
    )


def test_a_timeline_has_what_the_request_was() -> None:
    shown = timeline_of(replace(APART, tenant="acme"), None, 90, 12)
    assert (shown.tenant, shown.outcome, shown.total_s, shown.cached_tokens) == ("acme", "ok", 2.0, 64)
    assert (shown.ttft_s, shown.slo_met) == (0.7, True)


def test_a_timeline_has_the_claims_of_a_request_whose_costs_are_counted() -> None:
    assert timeline_of(APART, None, 90, 12).claims is None
    assert timeline_of(APART, None, 90, 12, {}).claims == []
    claims = {
        ("p-1", "prefill"): WorkSums(prefill=0.25, wasted=0.5),
        ("d-1", "decode"): WorkSums(requests=1.0, decode=1.0000004, kv=0.5, transfer=0.125),
    }
    assert timeline_of(APART, None, 90, 12, claims).claims == [
        WorkerClaim("p-1", "prefill", 0.25, 0.0, 0.0, 0.0, 0.5),
        WorkerClaim("d-1", "decode", 0.0, 1.0, 0.5, 0.125, 0.0),
    ]
