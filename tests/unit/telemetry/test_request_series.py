"""Requests that ended are counted the same whether they are added one by one or together."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvasir.core.requests import SloClass, Usage
from kvasir.ports.router import RequestSummary
from kvasir.ports.routing import CROSS_ROLE
from kvasir.telemetry.metrics import Metrics

SAMPLED = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
MOMENTS = st.sampled_from((None, 1.0, 1.25, 3.0))
TOKENS = st.integers(0, 3)

summaries = st.builds(
    RequestSummary,
    st.just("r"),
    st.sampled_from(("a", "b", "unknown")),
    st.sampled_from(("ok", "ok", "worker_lost", "client_closed", "unheard_of")),
    st.sampled_from((0.5, 1.0)),
    st.sampled_from((3.0, 70.0)),
    routed_s=MOMENTS,
    prefill_done_s=MOMENTS,
    first_token_s=MOMENTS,
    transfer_s=st.sampled_from((0.0, 0.25)),
    decode_worker=st.sampled_from((None, "w")),
    reason=st.sampled_from(("cost", CROSS_ROLE)),
    predicted_cached_tokens=TOKENS,
    retries=TOKENS,
    usage=st.builds(Usage, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS),
    slo=st.builds(SloClass, st.sampled_from(("s", "other class")), st.sampled_from((0.1, 9.0)), st.just(0.1)),
    trace_context=st.sampled_from(("", SAMPLED)),
)


def shown(registry: CollectorRegistry) -> dict[tuple[str, ...], tuple[float, object]]:
    return {
        (sample.name, *map(str, sorted(sample.labels.items()))): (sample.value, sample.exemplar)
        for family in registry.collect()
        for sample in family.samples
    }


def added(every: Iterable[RequestSummary], *, at_once: bool) -> CollectorRegistry:
    metrics = Metrics(registry := CollectorRegistry(), ["a", "b"], ["s"])
    for each in every:
        assert metrics.request_finished(each) is each.slo_met
        if not at_once:
            shown(registry)
    return registry


@given(st.lists(summaries, max_size=10))
def test_requests_that_are_added_together_count_as_one_by_one(every: list[RequestSummary]) -> None:
    together, apart = shown(added(every, at_once=True)), shown(added(every, at_once=False))
    assert together.keys() == apart.keys()
    for name, (value, exemplar) in together.items():
        assert math.isclose(value, apart[name][0]), name
        assert exemplar == apart[name][1], name


@pytest.mark.parametrize("count", [63, 64, 65, 1000])
def test_no_request_is_missing_from_a_scrape(count: int) -> None:
    summary = RequestSummary("r", "a", "ok", 1.0, 2.0, first_token_s=1.5, usage=Usage(5, output_tokens=3))
    registry = added([summary] * count, at_once=True)
    model = {"model": "a"}
    assert registry.get_sample_value("kvasir_requests_total", model | {"outcome": "ok"}) == count
    assert registry.get_sample_value("kvasir_output_tokens_total", model) == 3 * count
    assert registry.get_sample_value("kvasir_time_to_first_token_seconds_count", model) == count
    assert registry.get_sample_value("kvasir_time_to_first_token_seconds_sum", model) == 0.5 * count
