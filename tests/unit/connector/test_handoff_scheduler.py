"""The connector's scheduler side: offers, pulls and reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kvasir_workers.connector import stats
from kvasir_workers.connector.handoff.scheduler import HandoffScheduler
from kvasir_workers.connector.orders import ExtendOrder, OfferOrder, Received, StepOrders, StepReport
from kvasir_workers.connector.request_blocks import RequestProgress
from kvasir_workers.connector.stats import TransferTotals
from kvasir_workers.transfer.common.lease_keys import lease_key, seal
from kvasir_workers.transfer.common.ticket import decode

BLOCK = 32
LEASE = {"lease_id": "lease", "fence": 3, "ttl_s": 10.0}
PULL = {**LEASE, "blocks": 2, "ticket": "ticket"}


@dataclass
class Request:
    """The part of vLLM's request that is read."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None = None


@pytest.fixture
def side() -> HandoffScheduler:
    made = HandoffScheduler(BLOCK, max_lease_s=20.0, overlap=True)
    made.set_endpoints(["rank 0", "rank 1"])
    return made


def orders(side: HandoffScheduler, *progress: RequestProgress, preempted: Sequence[str] = ()) -> StepOrders:
    """Those of a step that computes `progress`."""
    return side.take_orders(progress, preempted, idle=not progress)


def step(before: int, after: int, request_id: str = "r") -> RequestProgress:
    """A step that brings a request, whose blocks are 100, 101, …, from `before` to `after` tokens."""
    return RequestProgress(request_id, before, after, lambda _: (list(range(100, 100 + -(-after // BLOCK))),))


def test_a_step_looks_at_its_requests_only_while_a_prompt_is_being_offered(side: HandoffScheduler) -> None:
    looked_at = 0

    def requests() -> Iterator[RequestProgress]:
        nonlocal looked_at
        looked_at += 1
        yield step(0, 64)

    side.arrived(Request("decoding", 8, {"pull": PULL}))
    side.take_orders(requests(), (), idle=False)
    assert looked_at == 0
    side.arrived(Request("r", 96, {"offer": LEASE}))
    assert side.take_orders(requests(), (), idle=False).offers
    assert looked_at == 1


@pytest.mark.parametrize(
    ("prompt", "local", "tokens", "missing"),
    [
        (1, 0, 0, slice(0, 0)),
        (2, 0, 1, slice(0, 1)),
        (32, 0, 31, slice(0, 1)),
        (33, 0, 32, slice(0, 1)),
        (33, 32, 0, slice(1, 1)),
        (34, 32, 1, slice(1, 2)),
        (500, 0, 499, slice(0, 16)),
        (500, 96, 403, slice(3, 16)),
    ],
)
def test_a_pull_covers_what_is_needed_before_the_last_token_and_missing_here(
    side: HandoffScheduler, prompt: int, local: int, tokens: int, missing: slice
) -> None:
    request = Request("r", prompt, {"pull": PULL})
    assert side.matched_tokens(request, local) == tokens
    blocks = list(range(100, 120))
    side.allocated(request, blocks, tokens)
    (order,) = orders(side).pulls
    assert order.targets == tuple(blocks[missing])
    assert order.parked is (tokens > 0)
    if tokens:
        assert order.first_block == missing.start


def test_a_pull_leaves_out_what_a_sliding_window_has_left_behind(side: HandoffScheduler) -> None:
    request = Request("r", 100, {"pull": PULL})
    side.allocated(request, [0, 0, 7, 8], 99)
    (order,) = orders(side).pulls
    assert (order.first_block, order.targets) == (2, (7, 8))


def test_a_request_pulls_once_though_it_is_computed_again(side: HandoffScheduler) -> None:
    request = Request("r", 100, {"pull": PULL})
    side.allocated(request, [1, 2, 3, 4], 99)
    assert side.matched_tokens(request, 0) == 0
    side.allocated(request, [1, 2, 3, 4], 0)
    assert len(orders(side).pulls) == 1
    assert orders(side).pulls == ()


def test_a_finished_prefill_is_offered_with_a_ticket_and_stays_pinned(side: HandoffScheduler) -> None:
    request = Request("r", 40, {"offer": {**LEASE, "ttl_s": 99.0}})
    pinned, out = side.finished(request, [7, 8, 9], completed=True)
    assert pinned
    assert out is not None
    assert {k: out[k] for k in ("lease_id", "fence", "ttl_s", "blocks")} == {
        "lease_id": "lease",
        "fence": 3,
        "ttl_s": 20.0,
        "blocks": 2,
    }
    ticket = decode(out["ticket"])
    assert (ticket.ranks, ticket.blocks) == (("rank 0", "rank 1"), (7, 8))
    assert ticket.total == 2
    (offer,) = orders(side).offers
    assert isinstance(offer, OfferOrder)
    assert (offer.request_id, offer.lease.ttl_s, offer.blocks) == ("r", 20.0, (7, 8))
    assert (offer.total, offer.final) == (2, True)
    assert side.take_stats() == {**dict.fromkeys(stats.COUNTERS, 0), stats.BLOCKS_LEASED: 3}
    side.update(None, sent=["r"], received=[])
    totals = TransferTotals(blocks_leased=3)
    totals.add(side.take_stats() or {})
    assert totals.blocks_leased == 0


def test_a_prefill_that_was_aborted_is_not_offered(side: HandoffScheduler) -> None:
    request = Request("r", 40, {"offer": LEASE})
    assert side.finished(request, [7, 8], completed=False) == (False, None)
    assert orders(side).offers == ()


def test_an_engine_without_endpoints_offers_nothing() -> None:
    side = HandoffScheduler(BLOCK, max_lease_s=20.0, overlap=True)
    assert side.finished(Request("r", 40, {"offer": LEASE}), [7, 8], completed=True) == (False, None)


def test_requests_without_transfer_parameters_are_left_alone(side: HandoffScheduler) -> None:
    for params in (None, {}, {"other": 1}):
        request = Request("r", 40, params)
        assert side.matched_tokens(request, 0) == 0
        side.allocated(request, [1, 2], 0)
        assert side.finished(request, [1, 2], completed=True) == (False, None)
    assert orders(side).pulls == ()


def test_malformed_parameters_are_computed_without_a_transfer(
    side: HandoffScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    request = Request("r", 40, {"pull": {"lease_id": 5}, "offer": "nonsense"})
    assert side.matched_tokens(request, 0) == 0
    assert side.finished(request, [1, 2], completed=True) == (False, None)
    assert "malformed" in caplog.text


def test_a_pull_over_two_ranks_counts_once_with_both_ranks_bytes(side: HandoffScheduler) -> None:
    request = Request("r", 64, {"pull": PULL})
    side.allocated(request, [1, 2], 63)
    side.update(StepReport(received={"r": Received(1000, 0.5)}), sent=[], received=[])
    side.update(StepReport(received={"r": Received(1000, 0.7)}), sent=[], received=["r"])
    totals = TransferTotals()
    totals.add(side.take_stats() or {})
    assert (totals.transfers_received, totals.bytes_received, totals.transfers_failed) == (1, 2000, 0)
    assert side.take_stats() is None
    assert side.finished(request, [1, 2], completed=True) == (
        False,
        {
            "transferred_tokens": 63,
            "transferred_blocks": 2,
            "transferred_bytes": 2000,
            "transfer_s": 0.7,
            "failed_tokens": 0,
            "failure": "",
        },
    )


def test_a_pull_that_one_rank_failed_has_failed(side: HandoffScheduler) -> None:
    request = Request("r", 64, {"pull": PULL})
    side.allocated(request, [1, 2], 63)
    report = StepReport(received={"r": Received(1000, 0.5)})
    report.merge(StepReport(received={"r": Received(0, 0.0, "timeout")}))
    side.update(report, sent=[], received=["r"])
    totals = TransferTotals()
    totals.add(side.take_stats() or {})
    assert (totals.transfers_received, totals.bytes_received, totals.transfers_failed) == (0, 0, 1)
    _, out = side.finished(request, [1, 2], completed=True)
    assert out is not None
    assert (out["failure"], out["transferred_tokens"], out["failed_tokens"]) == ("timeout", 0, 63)


def test_a_pull_whose_request_was_aborted_is_not_counted(side: HandoffScheduler) -> None:
    request = Request("r", 64, {"pull": PULL})
    side.allocated(request, [1, 2], 63)
    assert side.finished(request, [1, 2], completed=False) == (False, None)
    side.update(StepReport(received={"r": Received(1000, 0.5)}), sent=[], received=["r"])
    assert side.take_stats() is None


def test_the_engine_steps_until_an_unneeded_lease_is_confirmed_by_every_rank(side: HandoffScheduler) -> None:
    request = Request("r", 64, {"pull": PULL})
    assert side.finished(request, [], completed=False) == (False, None)
    assert side.has_pending_work()
    (order,) = orders(side).pulls
    assert (order.parked, order.targets) == (False, ())
    side.update(StepReport(confirmed={order.pull_id: 1}), sent=[], received=[])
    assert side.has_pending_work()
    side.update(StepReport(confirmed={order.pull_id: 1}), sent=[], received=[])
    assert not side.has_pending_work()


@pytest.fixture
def begun(side: HandoffScheduler) -> HandoffScheduler:
    """A prompt of 200 tokens, 7 blocks, is in its first step of 96 and was offered with it; 40 tokens were
    cached."""
    side.arrived(Request("r", 200, {"offer": LEASE}))
    (offer,) = orders(side, step(40, 96)).offers
    assert isinstance(offer, OfferOrder)
    assert (offer.request_id, offer.lease.lease_id, offer.blocks) == ("r", "lease", (100,))
    assert (offer.total, offer.final) == (7, False)
    return side


def test_a_prompt_of_several_steps_is_told_of_with_its_first_and_once(begun: HandoffScheduler) -> None:
    report = begun.take_stats()
    assert report is not None
    (early,) = report[stats.EARLY_HANDOFFS].items()
    request_id, handoff = early
    ticket = decode(handoff.pop("ticket"))
    assert (request_id, handoff) == ("r", {**LEASE, "blocks": 7})
    assert (ticket.ranks, ticket.blocks, ticket.total) == (("rank 0", "rank 1"), (), 7)
    assert begun.take_stats() is None


def test_blocks_are_named_in_the_step_after_the_one_that_filled_them(begun: HandoffScheduler) -> None:
    (extend,) = orders(begun, step(96, 160)).offers
    assert extend == ExtendOrder("r", "lease", (101, 102), final=False)
    assert orders(begun, step(96, 160)).offers == ()
    request = Request("r", 200, {"offer": LEASE})
    pinned, out = begun.finished(request, list(range(100, 108)), completed=True)
    assert pinned
    assert out is not None
    assert {k: out[k] for k in (*LEASE, "blocks")} == {**LEASE, "blocks": 7}
    assert decode(out["ticket"]).blocks == tuple(range(100, 107))
    (extend,) = orders(begun).offers
    assert extend == ExtendOrder("r", "lease", (103, 104, 105, 106), final=True)


def test_a_request_that_comes_to_nothing_ends_the_lease_that_was_told_of(begun: HandoffScheduler) -> None:
    assert begun.finished(Request("r", 200, {"offer": LEASE}), [100], completed=False) == (False, None)
    assert begun.has_pending_work()
    made = orders(begun)
    assert (made.releases, made.offers) == (("lease",), ())
    assert not begun.has_pending_work()
    assert begun.take_stats() is None


def test_a_preempted_request_loses_its_lease_before_others_write_and_is_offered_at_its_end(
    begun: HandoffScheduler,
) -> None:
    begun.take_stats()
    made = orders(begun, step(0, 64, "other"), preempted=["r", "other"])
    assert (made.releases, made.offers) == (("lease",), ())
    for before in (0, 64, 128):
        assert orders(begun, step(before, before + 64)).offers == ()
    assert begun.take_stats() is None
    pinned, out = begun.finished(Request("r", 200, {"offer": LEASE}), list(range(7)), completed=True)
    assert pinned
    assert out is not None
    (offer,) = orders(begun).offers
    assert isinstance(offer, OfferOrder)
    assert (offer.blocks, offer.final) == (tuple(range(7)), True)


def test_a_prompt_that_one_step_computes_is_offered_at_its_end(side: HandoffScheduler) -> None:
    side.arrived(Request("r", 64, {"offer": LEASE}))
    assert orders(side, step(0, 64)).offers == ()
    assert side.take_stats() is None


def test_without_overlap_nothing_is_offered_early() -> None:
    side = HandoffScheduler(BLOCK, max_lease_s=20.0, overlap=False)
    side.set_endpoints(["rank 0"])
    side.arrived(Request("r", 200, {"offer": LEASE}))
    assert orders(side, step(0, 96)).offers == ()
    assert side.take_stats() is None


def test_peers_that_any_rank_refused_are_counted(side: HandoffScheduler) -> None:
    report = StepReport(refused=2)
    report.merge(StepReport(refused=1))
    side.update(report, sent=[], received=[])
    totals = TransferTotals()
    totals.add(side.take_stats() or {})
    assert totals.transfer_peers_refused == 3
    assert side.take_stats() is None


def test_the_ticket_has_the_key_of_its_lease_for_each_rank(side: HandoffScheduler) -> None:
    secrets = [b"a" * 32, b"b" * 32]
    side.set_endpoints([seal(f"rank {rank}", [secret]) for rank, secret in enumerate(secrets)])
    request = Request("r", 40, {"offer": LEASE})
    _, out = side.finished(request, [1, 2], completed=True)
    assert out is not None
    keys = [lease_key(secret, "lease", 3) for secret in secrets]
    assert decode(out["ticket"]).ranks == tuple(seal(f"rank {rank}", [key]) for rank, key in enumerate(keys))
