"""Which cell serves a request, and why."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvasir_router.regions.choice import (
    CellCandidate,
    CellChoice,
    CellOffer,
    CellReason,
    CellRequest,
    ChoiceRules,
    choose,
    offers_of,
)
from kvasir_router.regions.reports import CellReport, ModelReport
from kvasir_router.regions.view import CellState, RegionView

MODEL = ModelReport("m", "r1", 4, 0.05, 10_000.0, 1_000_000, 2.0)
REQUEST = CellRequest("m", 2000, 300, promised_s=2.0)
RULES = ChoiceRules(margin_s=0.1)
NETWORK = {"own": 0.0, "near": 0.03, "far": 0.15}


def offer(cell: str, **changes: object) -> CellOffer:
    model = {name: changes.pop(name) for name in list(changes) if name in ModelReport.__struct_fields__}
    report = ModelReport(**{**dict(zip(MODEL.__struct_fields__, MODEL_VALUES, strict=True)), **model})
    return replace(CellOffer(cell, NETWORK[cell], report=report), **changes)  # type: ignore[arg-type]


MODEL_VALUES = tuple(getattr(MODEL, name) for name in MODEL.__struct_fields__)


def chosen(
    *offers: CellOffer, request: CellRequest = REQUEST, rules: ChoiceRules = RULES
) -> tuple[str | None, CellReason]:
    choice = choose(request, offers, rules)
    return choice.cell, choice.reason


def candidate(choice: CellChoice, cell: str) -> CellCandidate:
    return next(each for each in choice.candidates if each.cell == cell)


def test_the_nearest_cell_serves_while_it_has_capacity() -> None:
    assert chosen(offer("far"), offer("near"), offer("own")) == ("own", CellReason.NEAREST)


def test_requests_spill_over_when_another_cell_answers_sooner_by_the_margin() -> None:
    assert chosen(offer("own", queue_s=0.17), offer("near")) == ("own", CellReason.NEAREST)
    assert chosen(offer("own", queue_s=0.19), offer("near")) == ("near", CellReason.SPILL_OVER)


def test_the_network_counts_as_part_of_the_ttft() -> None:
    assert chosen(offer("own", queue_s=0.25), offer("far")) == ("own", CellReason.NEAREST)
    assert chosen(offer("own", queue_s=0.35), offer("far")) == ("far", CellReason.SPILL_OVER)


def test_what_was_sent_and_not_yet_reported_counts_as_queue() -> None:
    busy = offer("own", queue_s=0.3)
    assert chosen(busy, offer("near"))[0] == "near"
    assert chosen(busy, offer("near", pending_tokens=10_000))[0] == "own"


def test_a_cell_without_room_for_the_kv_is_passed_over() -> None:
    full = offer("own", kv_free_tokens=2299)
    assert chosen(full, offer("near")) == ("near", CellReason.SPILL_OVER)
    assert chosen(offer("own", kv_free_tokens=2300), offer("near")) == ("own", CellReason.NEAREST)


def test_without_room_anywhere_the_request_waits_where_it_is_soonest() -> None:
    full = [offer(cell, kv_free_tokens=0) for cell in ("own", "near")]
    assert chosen(*full) == ("own", CellReason.NEAREST)


def test_a_lost_draining_or_empty_cell_fails_over_to_the_next() -> None:
    for gone in (
        offer("own", state=CellState.LOST),
        offer("own", state=CellState.RETURNING),
        offer("own", draining=True),
        offer("own", ready=0),
        CellOffer("own", 0.0),
    ):
        assert chosen(gone, offer("near"), offer("far")) == ("near", CellReason.FAILOVER)


def test_a_stale_cell_serves_only_if_no_fresh_one_does() -> None:
    stale = offer("near", state=CellState.STALE)
    assert chosen(offer("own", ready=0), stale, offer("far")) == ("far", CellReason.SPILL_OVER)
    assert chosen(offer("own", ready=0), stale) == ("near", CellReason.FAILOVER)


def test_tenants_stay_where_their_data_may_be() -> None:
    kept = replace(REQUEST, residency=frozenset(("far",)))
    slow = offer("far", queue_s=60.0, kv_free_tokens=0)
    assert chosen(offer("own"), offer("near"), slow, request=kept) == ("far", CellReason.NEAREST)
    assert chosen(offer("own"), offer("far", ready=0), request=kept) == (None, CellReason.UNSERVED)
    assert chosen(offer("own"), offer("near"), request=kept) == (None, CellReason.RESIDENCY)


def test_a_cheaper_cell_serves_if_the_price_is_worth_the_longer_ttft() -> None:
    rules = ChoiceRules(margin_s=0.1, price_s=0.2)
    assert chosen(offer("own"), offer("far", dollars_per_mtok=1.0), rules=rules)[0] == "own"
    cheap = offer("far", dollars_per_mtok=0.5)
    assert chosen(offer("own"), cheap, rules=rules) == ("far", CellReason.PRICE)
    assert chosen(offer("own"), cheap, rules=RULES) == ("own", CellReason.NEAREST)


def test_price_does_not_lead_where_the_promised_ttft_is_in_danger() -> None:
    rules = ChoiceRules(margin_s=0.1, price_s=10.0)
    cheap = offer("far", dollars_per_mtok=0.1, queue_s=0.8)
    assert chosen(offer("own"), cheap, rules=rules)[0] == "own"
    assert chosen(offer("own"), offer("far", dollars_per_mtok=0.1), rules=rules)[0] == "far"


def test_a_cached_prefix_counts_as_time_that_is_saved() -> None:
    held = replace(REQUEST, cached={"near": 1990})
    assert chosen(offer("own"), offer("near"), request=held) == ("near", CellReason.SPILL_OVER)


def test_a_stream_goes_on_at_the_revision_that_began_it() -> None:
    other = replace(REQUEST, revision="r2")
    view = RegionView(("near",))
    view.heard(CellReport("near", 1, 1, (MODEL, ModelReport("m", "r2", 1, kv_free_tokens=9999))), 0.0)
    own = CellReport("own", 1, 1, (MODEL,))
    choice = choose(other, offers_of(view, own, other, NETWORK, 0.0), RULES)
    assert (choice.cell, choice.reason) == ("near", CellReason.FAILOVER)
    assert candidate(choice, "own").refused == "it does not serve m at revision r2"
    choice = choose(REQUEST, offers_of(view, own, REQUEST, NETWORK, 0.0), RULES)
    assert choice.cell == "own"


def test_cells_are_tried_in_order_without_those_that_were_tried() -> None:
    offers = [offer("own", queue_s=0.3), offer("near"), offer("far", queue_s=0.0)]
    assert choose(REQUEST, offers, RULES).order == ("near", "far", "own")
    again = choose(replace(REQUEST, avoid=frozenset(("near",))), offers, RULES)
    assert (again.cell, again.reason) == ("far", CellReason.SPILL_OVER)
    assert candidate(again, "near").refused == "it was tried"


def test_a_choice_explains_every_cell() -> None:
    choice = choose(REQUEST, [offer("own"), offer("near", state=CellState.LOST, why="no report")], RULES)
    own = candidate(choice, "own")
    assert (own.network_s, own.queue_s, own.prefill_s) == (0.0, 0.05, 0.2)
    assert candidate(choice, "near").refused == "lost: no report"
    assert [each.cell for each in choice.candidates] == ["own", "near"]


_OFFERS = st.lists(
    st.builds(
        lambda cell, network, state, ready, queue, rate, room, price, pending, draining: CellOffer(
            cell, network, state, ModelReport("m", "", ready, queue, rate, room, price), pending, draining
        ),
        st.sampled_from("abcdefgh"),
        st.floats(0.0, 0.4),
        st.sampled_from(CellState),
        st.integers(0, 3),
        st.floats(0.0, 100.0),
        st.floats(0.0, 1e5),
        st.integers(0, 5000),
        st.floats(0.0, 20.0),
        st.integers(0, 100_000),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda each: each.cell,
)


@given(_OFFERS, st.none() | st.frozensets(st.sampled_from("abcdefgh")), st.floats(0.0, 1.0))
def test_no_choice_breaks_residency_or_uses_a_cell_that_cannot_serve(
    offers: list[CellOffer], residency: frozenset[str] | None, price_s: float
) -> None:
    request = replace(REQUEST, residency=residency)
    choice = choose(request, offers, ChoiceRules(price_s=price_s))
    able = {
        each.cell
        for each in offers
        if each.state.usable and not each.draining and each.report is not None and each.report.ready
    }
    allowed = able if residency is None else able & residency
    assert set(choice.order) == allowed
    assert (choice.cell is None) == (not allowed)
    assert choice.cell is None or choice.order[0] == choice.cell
