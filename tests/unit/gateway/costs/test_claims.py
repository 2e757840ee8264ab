"""What a request claims of its workers, and that it does not matter which requests are divided together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.config.spec.deployment import Deployment
from kvasir.core.demand import WorkerStats
from kvasir.core.requests import Role, SloClass, Usage
from kvasir.ports.router import LostAttempt, RequestSummary, WorkerView
from kvasir.ports.stores.costs import HOUR_S, CostGroup, WorkSums
from kvasir_platform.gateway.costs.ledger import OTHER, CostLedger
from kvasir_platform.gateway.costs.prices import Prices

EPOCH = 1_900_000_800 // HOUR_S * HOUR_S
SLO = SloClass("default", 1.0, 0.1)
APART = RequestSummary(
    "r",
    "m",
    "ok",
    arrival_s=99.0,
    finished_s=110.0,
    routed_s=100.0,
    prefill_done_s=102.0,
    first_token_s=103.0,
    prefill_worker="p",
    decode_worker="d",
    pulled_s=0.5,
    tier_s=0.25,
    usage=Usage(prompt_tokens=1000, cached_tokens=200, output_tokens=71),
    slo=SLO,
    tenant="shop",
    key="key",
    started_s=100.0,
    prompt_tokens=1000,
    sent_tokens=71,
)
WHOLE = replace(APART, prefill_worker=None, prefill_done_s=None)
VECTOR = replace(
    APART, decode_worker=None, prefill_done_s=None, first_token_s=None, finished_s=101.0, sent_tokens=0,
    usage=Usage(prompt_tokens=1000),
)  # fmt: skip
FAILED = replace(APART, outcome="worker_lost")


class Source:
    """A worker that prefills and one that decodes."""

    def workers(self) -> list[WorkerView]:
        return []

    def worker_figures(self) -> list[WorkerStats]:
        return [
            WorkerStats("p", "prefill", Role.PREFILL, True, 0.01, 0.001, 0.0, 0.0, 0, 10_000, 0, 0),
            WorkerStats("d", "decode", Role.DECODE, True, 0.01, 0.001, 0.05, 0.01, 0, 20_000, 0, 0),
        ]


def ledger() -> CostLedger:
    made = CostLedger("router", Prices(Deployment()), lambda: 100.0, lambda: EPOCH + 100.0)
    made.source = Source()
    return made


def taken(made: CostLedger) -> Mapping[CostGroup, WorkSums]:
    batch = made.take()
    return {} if batch is None else batch.work


def claimed(*summaries: RequestSummary) -> dict[str, dict[str, float]]:
    """By pool, what is not zero of the claims."""
    made = ledger()
    for summary in summaries:
        made.ended(summary)
    return {
        group.pool: {name: amount for name, amount in sums._asdict().items() if amount}
        for group, sums in taken(made).items()
    }


TOKENS = {"requests": 1.0, "prompt_tokens": 1000.0, "cached_tokens": 200.0, "output_tokens": 71.0}


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        pytest.param(
            APART,
            {
                "prefill": {"prefill": 0.8, "kv": 0.1 * 1.75, "transfer": 0.1 * 0.75},
                # Steps of 0.1 s: five streams share each of them.
                "decode": TOKENS
                | {"decode": 7.0 / 5, "kv": 1035.5 / 20_000 * 7.5, "transfer": 1035.5 / 20_000 * 0.5},
            },
            id="prefill and decode apart",
        ),
        pytest.param(
            WHOLE,
            {
                "decode": TOKENS
                | {
                    "prefill": 0.8,
                    "decode": 7.0 / 5,
                    "kv": 1035.5 / 20_000 * 9.25,
                    "transfer": 1035.5 / 20_000 * 0.75,
                }
            },
            id="whole on one worker",
        ),
        pytest.param(
            VECTOR,
            {
                "prefill": {
                    "requests": 1.0, "prompt_tokens": 1000.0, "prefill": 1.0, "kv": 0.1 * 0.75,
                    "transfer": 0.1 * 0.25,
                }
            },
            id="only prefilled",
        ),
        pytest.param(
            FAILED,
            {
                "prefill": {"wasted": 0.8 + 0.1 * 2.5},
                "decode": {"wasted": 7.0 / 5 + 1035.5 / 20_000 * 8.0},
            },
            id="in vain",
        ),
        pytest.param(
            replace(APART, started_s=105.0),
            {
                "prefill": {"prefill": 0.8, "kv": 0.1 * (0.8 - 0.25), "transfer": 0.1 * 0.75},
                # After 105.8 s the second prompt is computed.
                "decode": TOKENS
                | {"decode": 7.0 / 5, "kv": 1035.5 / 20_000 * 3.7, "transfer": 1035.5 / 20_000 * 0.5},
            },
            id="goes on after a failover",
        ),
        pytest.param(
            replace(WHOLE, decode_worker="gone"),
            {OTHER: TOKENS | {"prefill": 3.0, "decode": 7.0}},
            id="on a worker of which nothing is known",
        ),
        pytest.param(
            replace(WHOLE, usage=Usage(), predicted_cached_tokens=500, sent_tokens=0, first_token_s=None),
            {
                "decode": {
                    "requests": 1.0, "prompt_tokens": 1000.0, "cached_tokens": 500.0, "prefill": 0.5,
                    "kv": 0.05 * 9.25, "transfer": 0.05 * 0.75,
                }
            },
            id="whose worker said nothing",
        ),
        pytest.param(replace(APART, routed_s=None), {}, id="never routed"),
        pytest.param(replace(APART, refused=True), {}, id="refused"),
        pytest.param(replace(APART, prefill_worker=None, decode_worker=None), {}, id="on no worker"),
        pytest.param(
            replace(APART, routed_s=None, lost=(LostAttempt("p", "d", 90.0, 95.0, 500, 100),)),
            {"prefill": {"wasted": 0.5}, "decode": {"wasted": 1.0}},
            id="lost attempts",
        ),
    ],
)  # fmt: skip
def test_a_request_claims(summary: RequestSummary, expected: dict[str, dict[str, float]]) -> None:
    found = claimed(summary)
    assert found.keys() == expected.keys()
    for pool, sums in expected.items():
        assert found[pool] == pytest.approx(sums), pool


ELSEWHERE = replace(WHOLE, decode_worker="gone")
MOVED = replace(APART, lost=(LostAttempt("p", "d", 90.0, 95.0, 500, 100),))
ENDED = [APART, WHOLE, VECTOR, FAILED, ELSEWHERE, MOVED]
KINDS = st.sampled_from(ENDED)
TENANTS = st.sampled_from(["shop", "lab"])
LATER = st.sampled_from([0.0, 1.0, HOUR_S - 105.0, HOUR_S - 100.0, HOUR_S + 10.0])


@pytest.mark.parametrize("summary", [*ENDED, replace(APART, routed_s=None), replace(MOVED, routed_s=None)])
def test_what_one_request_claims_is_what_is_added_for_it(summary: RequestSummary) -> None:
    made = ledger()
    made.ended(summary)
    found: defaultdict[str, WorkSums] = defaultdict(WorkSums)
    for (worker, pool), sums in made.claims_of(summary).items():
        assert pool == {"p": "prefill", "d": "decode"}.get(worker, OTHER)
        found[pool] = found[pool].plus(sums)
    added = {group.pool: sums for group, sums in taken(made).items()}
    assert found.keys() == added.keys()
    for pool, sums in added.items():
        assert found[pool] == pytest.approx(sums), pool
    assert made.take() is None


def test_a_worker_of_several_attempts_is_listed_once_and_in_their_order() -> None:
    found = ledger().claims_of(replace(WHOLE, lost=(LostAttempt("p", "d", 90.0, 95.0, 500, 100),)))
    assert list(found) == [("p", "prefill"), ("d", "decode")]
    assert found["p", "prefill"].claims == found["p", "prefill"].wasted == pytest.approx(0.5)
    assert (found["d", "decode"].wasted, found["d", "decode"].decode) == pytest.approx((1.0, 7.0 / 5))


@given(st.lists(st.tuples(KINDS, TENANTS, LATER), max_size=12))
def test_requests_claim_the_same_together_and_one_by_one(drawn: list[tuple[Any, str, float]]) -> None:
    together, alone = ledger(), ledger()
    expected: defaultdict[CostGroup, WorkSums] = defaultdict(WorkSums)
    for summary, tenant, later in drawn:
        times = {
            name: value + later
            for name in (
                "arrival_s",
                "finished_s",
                "routed_s",
                "started_s",
                "prefill_done_s",
                "first_token_s",
            )
            if (value := getattr(summary, name)) is not None
        }
        moved = replace(summary, tenant=tenant, **times)
        together.ended(moved)
        alone.ended(moved)
        for group, sums in taken(alone).items():
            expected[group] = expected[group].plus(sums)
    found = taken(together)
    assert found.keys() == expected.keys()
    for group, sums in expected.items():
        assert found[group] == pytest.approx(sums), group
