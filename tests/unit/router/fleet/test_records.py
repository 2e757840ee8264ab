"""Decisions are stored trimmed and bounded, and rendered as records on request."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvasir.core.requests import SloClass, Usage
from kvasir.ports.router import RequestSummary
from kvasir.ports.routing import (
    LOWER_TIERS,
    SCORE,
    Candidates,
    Plan,
    RateColumns,
    RequestView,
    RoutingTarget,
    TermTable,
)
from kvasir_router.decide.packing import Decided
from kvasir_router.fleet.decision_entry import _FACTS, PLACES, entry_of, record_of
from kvasir_router.fleet.decision_log import DecisionLog
from kvasir_router.fleet.judgement import kept_regret

SLO = SloClass("chat", ttft_s=1.0, itl_s=0.05)
DECIDED = Decided(arrival_s=9.5, now_s=10.0, took_s=20e-6)


def candidates(count: int) -> Candidates:
    """The first half prefills, the other half decodes; place i has i cached tokens and 10 * i + tier in
    the tiers."""
    zeros, nothing = np.zeros(count, np.int64), np.zeros(count)
    tiers = 10 * np.arange(count)[:, None] + np.arange(LOWER_TIERS)
    tiered = np.zeros((count, LOWER_TIERS))
    rates = RateColumns(nothing, nothing, nothing, nothing, nothing, nothing, tiered, tiered)
    return Candidates(
        targets=tuple(RoutingTarget(f"w{i}") for i in range(count)),
        worker=np.arange(count),
        prefills=np.arange(count) < count // 2,
        decodes=np.arange(count) >= count // 2,
        cached_tokens=np.arange(count),
        tier_tokens=tiers,
        queued_prefill_tokens=zeros,
        waiting=zeros,
        streams=zeros,
        reserved_kv_tokens=zeros,
        held_tokens=zeros,
        kv_tokens=zeros + 1000,
        kv_token_bytes=nothing,
        block_size=zeros + 16,
        rates=rates,
    )


def table(part: str, rows: list[int], totals: list[float], unit: str = "s") -> TermTable:
    """Two terms, of a third and two thirds of the total."""
    values = np.array(totals)[:, None] * np.array([1.0, 2.0]) / 3.0
    return TermTable(part, unit, np.array(rows), ("queue", "prefill"), values)


def view(request_id: str = "r") -> RequestView:
    return RequestView(request_id, prompt_tokens=100, output_tokens=20, slo=SLO)


def summary(request_id: str = "r", outcome: str = "ok") -> RequestSummary:
    return RequestSummary(
        request_id,
        "m",
        outcome,
        arrival_s=9.5,
        first_token_s=10.3,
        finished_s=10.8,
        usage=Usage(prompt_tokens=100, cached_tokens=64, output_tokens=11),
        slo=SLO,
    )


@pytest.fixture
def took() -> list[float]:
    return []


@pytest.fixture
def log(took: list[float]) -> DecisionLog:
    return DecisionLog(2, policy="cost", stopwatch=lambda: 0.0, on_decision=took.append)


def exact(targets: Sequence[RoutingTarget]) -> tuple[tuple[str, str], ...]:
    return (("pool", "exact"),) * len(targets)


def decide(
    log: DecisionLog,
    plan: Plan,
    places: Candidates | None = None,
    request_id: str = "r",
) -> None:
    log.decided(view(request_id), places or candidates(4), plan, DECIDED, exact)


APART = Plan(
    RoutingTarget("w0"),
    RoutingTarget("w3"),
    "disaggregated_prefix",
    48,
    0.4,
    (table("prefill", [0, 1], [0.3, 0.6]), table("decode", [2, 3], [0.5, 0.2])),
)


def test_a_record_shows_who_was_considered_best_first_with_facts_and_terms(log: DecisionLog) -> None:
    decide(log, APART)
    record = log.explain("r")
    assert record is not None
    assert (record.mode, record.reason, record.prefill_worker, record.decode_worker) == (
        "disaggregated", "disaggregated_prefix", "w0", "w3",
    )  # fmt: skip
    prefill, decode = record.parts
    assert [(place.worker_id, place.chosen) for place in prefill.places] == [("w0", True), ("w1", False)]
    assert [(place.worker_id, place.chosen) for place in decode.places] == [("w3", True), ("w2", False)]
    assert decode.places[0].terms == {"queue": pytest.approx(0.2 / 3), "prefill": pytest.approx(0.4 / 3)}
    assert decode.places[0].total == pytest.approx(0.2)
    assert decode.places[0].facts["cached_tokens"] == 3.0
    assert [decode.places[0].facts[f"{tier}_tokens"] for tier in ("cpu", "disk", "remote")] == [30, 31, 32]
    assert (decode.places[0].pool, decode.places[0].kv_state) == ("pool", "exact")
    assert record.queued_s == 0.5


def test_facts_and_rates_are_those_of_their_columns(log: DecisionLog) -> None:
    columns: dict[str, Any] = {name: 100 * at + np.arange(4) for at, name in enumerate(_FACTS)}
    seconds: dict[str, Any] = {
        name: np.arange(4) / (at + 3) for at, name in enumerate(RateColumns._fields[:6])
    }
    places = candidates(4)
    places = replace(places, **columns, rates=places.rates._replace(**seconds))
    decide(log, APART, places)
    record = log.explain("r")
    assert record is not None
    found = {place.worker_id: place.facts for part in record.parts for place in part.places}
    assert {name: [found[f"w{at}"][name] for at in range(4)] for name in _FACTS} == {
        name: column.tolist() for name, column in columns.items()
    }
    entry = entry_of(view(), places, APART, decided=DECIDED, attempt=1, about=exact)
    rates = ("prefill_fixed_s", "step_fixed_s", "step_stream_s")
    assert entry.rates.tolist() == [seconds[name].tolist() for name in rates]


def test_of_scores_the_largest_is_first(log: DecisionLog) -> None:
    plan = Plan(
        None, RoutingTarget("w1"), "score", tables=(table("whole", [0, 1, 2], [0.1, 0.9, 0.5], SCORE),)
    )
    decide(log, plan)
    record = log.explain("r")
    assert record is not None
    assert [place.worker_id for place in record.parts[0].places] == ["w1", "w2", "w0"]


def test_a_part_that_was_weighed_and_not_run_has_nothing_chosen(log: DecisionLog) -> None:
    decide(log, replace(APART, tables=(*APART.tables, table("whole", [2, 3], [9.0, 8.0]))))
    record = log.explain("r")
    assert record is not None
    assert [sum(place.chosen for place in part.places) for part in record.parts] == [1, 1, 0]


def test_a_policy_without_terms_still_shows_who_could(log: DecisionLog) -> None:
    decide(log, Plan(RoutingTarget("w1"), RoutingTarget("w2"), "round_robin"))
    record = log.explain("r")
    assert record is not None
    assert [(part.part, [place.worker_id for place in part.places]) for part in record.parts] == [
        ("prefill", ["w1", "w0"]),
        ("decode", ["w2", "w3"]),
    ]


@pytest.mark.parametrize("unit", ["s", SCORE])
def test_of_many_places_the_best_and_the_chosen_are_kept_and_the_rest_counted(
    log: DecisionLog, unit: str
) -> None:
    count, worst = 100, 0 if unit == SCORE else 99
    totals = [float(i) for i in range(count)]
    plan = Plan(
        None, RoutingTarget(f"w{worst}"), "x", tables=(table("whole", list(range(count)), totals, unit),)
    )
    decide(log, plan, candidates(count))
    record = log.explain("r")
    assert record is not None
    kept = [int(place.worker_id[1:]) for place in record.parts[0].places]
    best = list(range(99, -1, -1) if unit == SCORE else range(count))[: PLACES - 1]
    assert kept == [*best, worst]
    assert record.omitted == count - PLACES
    assert [place.facts["cached_tokens"] for place in record.parts[0].places] == [float(i) for i in kept]


def test_what_came_of_it_is_filled_in_at_the_end(log: DecisionLog) -> None:
    decide(log, APART)
    record = log.explain("r")
    assert record is not None
    assert (record.outcome, record.actual_cached_tokens, record.actual_ttft_s, record.slo_met) == (None,) * 4
    log.ended(summary())
    record = log.explain("r")
    assert record is not None
    assert (record.outcome, record.actual_cached_tokens, record.slo_met) == ("ok", 64, True)
    assert record.actual_ttft_s == pytest.approx(0.8)
    assert record.actual_itl_s == pytest.approx(0.05)


def test_a_failed_request_tells_of_no_cache_hit_and_has_missed_its_slo(log: DecisionLog) -> None:
    decide(log, APART)
    log.ended(summary(outcome="worker_lost"))
    record = log.explain("r")
    assert record is not None
    assert (record.outcome, record.actual_cached_tokens, record.slo_met) == ("worker_lost", None, False)


def test_only_the_last_attempt_is_kept(log: DecisionLog) -> None:
    decide(log, APART)
    decide(log, Plan(None, RoutingTarget("w2"), "again"))
    record = log.explain("r")
    assert record is not None
    assert (record.attempt, record.reason, len(log)) == (2, "again", 1)


def test_the_newest_that_ended_are_kept_and_all_in_flight(log: DecisionLog, took: list[float]) -> None:
    for i in range(5):
        decide(log, APART, request_id=f"r{i}")
    assert len(log) == 5
    for i in (4, 0, 2):
        log.ended(summary(f"r{i}"))
    log.ended(summary("never decided"))
    assert [i for i in range(5) if log.explain(f"r{i}")] == [0, 1, 2, 3]
    assert took == [20e-6] * 5


def test_a_capacity_of_nothing_keeps_nothing_and_still_measures(took: list[float]) -> None:
    log = DecisionLog(0, policy="cost", stopwatch=lambda: 0.0, on_decision=took.append)
    decide(log, APART)
    assert (len(log), log.explain("r"), took) == (0, None, [20e-6])


def test_a_record_of_a_few_places_outlives_their_columns(log: DecisionLog) -> None:
    places = candidates(4)
    decide(log, APART, places)
    for name in ("cached_tokens", "streams", "kv_tokens", "tier_tokens"):
        getattr(places, name)[:] = -1
    record = log.explain("r")
    assert record is not None
    chosen = record.parts[1].places[0]
    assert (chosen.worker_id, chosen.facts["cached_tokens"], chosen.facts["kv_tokens"]) == ("w3", 3.0, 1000.0)
    assert (chosen.facts["streams"], chosen.facts["cpu_tokens"]) == (0.0, 30.0)


def test_a_record_outlives_the_columns_and_holds_neither_prompt_nor_fleet(log: DecisionLog) -> None:
    places = candidates(200)
    rows = list(range(200))
    plan = Plan(None, RoutingTarget("w0"), "x", tables=(table("whole", rows, [float(i) for i in rows]),))
    request = replace(view(), block_hashes=array("Q", range(1000)))
    log.decided(request, places, plan, DECIDED, exact)
    places.cached_tokens[:] = -1
    record = log.explain("r")
    assert record is not None
    assert record.parts[0].places[5].facts["cached_tokens"] == 5.0
    reached, frontier = set[int](), [log]
    while frontier:
        one = frontier.pop()
        if id(one) not in reached and not isinstance(one, type) and not callable(one):
            reached.add(id(one))
            frontier += gc.get_referents(one)
    large = (places, places.targets, plan.tables[0].values, plan, request, request.block_hashes)
    assert not reached & {id(one) for one in large}


def test_the_summaries_of_the_requests_that_ended_last_are_listed_in_their_order(log: DecisionLog) -> None:
    for name in ("a", "b", "c"):
        decide(log, APART, request_id=name)
    for name in ("b", "a", "c"):
        log.ended(summary(name))
    log.ended(summary("never placed"))
    assert [each.request_id for each in log.latest] == ["a", "c"]


LINKED = replace(
    APART,
    tables=(
        APART.tables[0],
        replace(APART.tables[1], links=np.array([1, 2], np.uint8)),
        # In the order of columns, and with so many terms that the order changes their sums.
        TermTable(
            "whole", "s", np.arange(4), tuple("abcdefghijkl"), np.random.default_rng(0).random((12, 4)).T
        ),
    ),
)
MANY = Plan(
    None, RoutingTarget("w50"), "x", tables=(table("whole", list(range(100)), [i / 7 for i in range(100)]),)
)
UNSCORED = Plan(RoutingTarget("w1"), RoutingTarget("w2"), "größe 🙂", 2**40, predicted_tier_tokens=(1, 0, 2))


@pytest.mark.parametrize(
    ("plan", "places"),
    [(APART, 4), (LINKED, 4), (MANY, 100), (UNSCORED, 4)],
    ids=["apart", "linked", "many", "unscored"],
)
@pytest.mark.parametrize("slo", [SLO, SloClass("other ß", 0.5, 1e-9)], ids=["same", "other"])
def test_the_record_of_an_ended_request_is_that_of_its_decision(
    log: DecisionLog, plan: Plan, places: int, slo: SloClass
) -> None:
    about = exact([RoutingTarget("")] * (places - 1))

    def states(targets: Sequence[RoutingTarget]) -> tuple[tuple[str, str], ...]:
        return (("größe", "predicted"), *about)[: len(targets)]

    asked, found, decided = replace(view(), slo=slo), candidates(places), DECIDED._replace(policy="named")
    entry = entry_of(asked, found, plan, decided=decided, attempt=1, about=states)
    entry.summary = replace(summary(), routed_s=DECIDED.now_s)
    kept_regret(entry)
    log.decided(asked, found, plan, decided, states)
    log.ended(entry.summary)
    decide(log, APART, request_id="next")
    log.ended(summary("next"))
    assert log.explain("r") == record_of("r", "cost", entry)


def test_records_have_the_states_of_workers_as_they_were_at_their_decisions(log: DecisionLog) -> None:
    known = {"state": "exact"}
    for name, state in (("a", "exact"), ("b", "exact"), ("c", "predicted")):
        known["state"] = state
        log.decided(
            view(name),
            candidates(4),
            APART,
            DECIDED,
            lambda targets: (("pool", known["state"]),) * len(targets),
        )
    records = [log.explain(name) for name in ("a", "b", "c")]
    found = [record.parts[0].places[0].kv_state for record in records if record is not None]
    assert found == ["exact", "exact", "predicted"]


def test_more_requests_than_are_worked_on_at_once_are_all_counted() -> None:
    log = DecisionLog(1000, policy="cost", stopwatch=lambda: 0.0, on_decision=lambda _: None)
    for i in range(100):
        decide(log, APART, request_id=f"r{i}")
        log.ended(summary(f"r{i}"))
    assert len(log) == 100
    assert [each.request_id for each in log.latest] == [f"r{i}" for i in range(100)]
    assert all(log.explain(f"r{i}") for i in range(100))
