"""What the connector's scheduler half offers, pulls and reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kvasir_workers.connector import stats
from kvasir_workers.connector.handoff_scheduler import HandoffScheduler
from kvasir_workers.connector.orders import Received, StepReport
from kvasir_workers.connector.stats import TransferTotals
from kvasir_workers.transfer.ticket import decode

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
    made = HandoffScheduler(BLOCK, max_lease_s=20.0)
    made.set_endpoints(["rank 0", "rank 1"])
    return made


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
    (order,) = side.take_orders(idle=True).pulls
    assert order.targets == tuple(blocks[missing])
    assert order.parked is (tokens > 0)
    if tokens:
        assert order.first_block == missing.start


def test_a_request_pulls_once_though_it_is_computed_again(side: HandoffScheduler) -> None:
    request = Request("r", 100, {"pull": PULL})
    side.allocated(request, [1, 2, 3, 4], 99)
    assert side.matched_tokens(request, 0) == 0
    side.allocated(request, [1, 2, 3, 4], 0)
    assert len(side.take_orders(idle=True).pulls) == 1
    assert side.take_orders(idle=True).pulls == ()


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
    (offer,) = side.take_orders(idle=True).offers
    assert (offer.request_id, offer.lease.ttl_s, offer.blocks) == ("r", 20.0, (7, 8))
    assert side.take_stats() == {**dict.fromkeys(stats.COUNTERS, 0), stats.BLOCKS_LEASED: 3}
    side.update(None, sent=["r"], received=[])
    totals = TransferTotals(blocks_leased=3)
    totals.add(side.take_stats() or {})
    assert totals.blocks_leased == 0


def test_a_prefill_that_was_aborted_is_not_offered(side: HandoffScheduler) -> None:
    request = Request("r", 40, {"offer": LEASE})
    assert side.finished(request, [7, 8], completed=False) == (False, None)
    assert side.take_orders(idle=True).offers == ()


def test_an_engine_without_endpoints_offers_nothing() -> None:
    side = HandoffScheduler(BLOCK, max_lease_s=20.0)
    assert side.finished(Request("r", 40, {"offer": LEASE}), [7, 8], completed=True) == (False, None)


def test_requests_without_transfer_parameters_are_left_alone(side: HandoffScheduler) -> None:
    for params in (None, {}, {"other": 1}):
        request = Request("r", 40, params)
        assert side.matched_tokens(request, 0) == 0
        side.allocated(request, [1, 2], 0)
        assert side.finished(request, [1, 2], completed=True) == (False, None)
    assert side.take_orders(idle=True).pulls == ()


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
    (order,) = side.take_orders(idle=True).pulls
    assert (order.parked, order.targets) == (False, ())
    side.update(StepReport(confirmed={order.pull_id: 1}), sent=[], received=[])
    assert side.has_pending_work()
    side.update(StepReport(confirmed={order.pull_id: 1}), sent=[], received=[])
    assert not side.has_pending_work()
