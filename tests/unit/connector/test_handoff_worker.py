"""What the connector's worker half makes of orders and of transfers that go wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion, LeaseEnded, Offer, Pulled, PullFailed, TransferEvent
from kvasir_workers.connector import handoff_worker
from kvasir_workers.connector.handoff_worker import HandoffWorker
from kvasir_workers.connector.orders import OfferOrder, OfferParams, PullOrder, PullParams, Received
from kvasir_workers.transfer.ticket import Ticket, encode


class Script:
    """A transfer whose events the test writes."""

    def __init__(self) -> None:
        self.upcoming: list[list[TransferEvent]] = []
        self.offered: list[str] = []
        self.pulled: list[tuple[str, Offer, tuple[int, ...], tuple[int, ...]]] = []
        self.released: list[str] = []

    def register(self, regions: Sequence[KvRegion], layout: KvLayout) -> str:
        return "endpoint"

    def offer(self, lease_id: str, fence: int, blocks: Sequence[int], ttl_s: float) -> Offer:
        if lease_id in self.offered:
            raise TransferError("live already")
        self.offered.append(lease_id)
        return Offer(lease_id, fence, ttl_s, tuple(blocks), "endpoint")

    def pull(
        self, pull_id: str, offer: Offer, source: Sequence[int], target: Sequence[int], timeout_s: float
    ) -> None:
        self.pulled.append((pull_id, offer, tuple(source), tuple(target)))

    def release(self, lease_id: str) -> None:
        self.released.append(lease_id)

    def poll(self) -> list[TransferEvent]:
        return self.upcoming.pop(0) if self.upcoming else []

    def close(self) -> None:
        self.upcoming.clear()


class Bench:
    """Rank 1 of 2, whose naps are counted."""

    def __init__(self) -> None:
        self.transfer = Script()
        self.naps: list[float] = []
        self.side = HandoffWorker(self.transfer, rank=1, ranks=2, timeout_s=5.0, pause=self.naps.append)

    def offer(self, request_id: str, lease_id: str) -> None:
        self.side.offer([OfferOrder(request_id, OfferParams(lease_id, 1, 10.0), (1, 2))])

    def pull(
        self,
        pull_id: str,
        ticket: str | None = None,
        *,
        first: int = 0,
        targets: tuple[int, ...] = (),
        parked: bool = True,
    ) -> None:
        text = encode(Ticket(("rank 0", "rank 1"), (5, 6, 7))) if ticket is None else ticket
        self.side.pull([PullOrder(pull_id, PullParams("l", 1, 10.0, 3, text), first, targets, parked)])


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_rank_pulls_its_own_part_from_the_first_missing_block(bench: Bench) -> None:
    bench.pull("r", first=1, targets=(20, 21))
    ((pull_id, offer, source, target),) = bench.transfer.pulled
    assert (pull_id, offer.endpoint, source, target) == ("r", "rank 1", (6, 7), (20, 21))
    bench.transfer.upcoming = [[Pulled("r", 2000, 0.25)]]
    assert bench.side.poll(idle=True) == (set(), {"r"})
    report = bench.side.take_report()
    assert report is not None
    assert report.received == {"r": Received(2000, 0.25)}
    assert bench.side.take_bad_blocks() == set()
    assert bench.side.take_report() is None


def test_a_failed_pull_reports_the_request_as_received_and_its_blocks_as_bad(bench: Bench) -> None:
    bench.pull("r", targets=(20, 21))
    bench.transfer.upcoming = [[PullFailed("r", "timeout", "")]]
    assert bench.side.poll(idle=True) == (set(), {"r"})
    assert bench.side.take_bad_blocks() == {20, 21}
    assert bench.side.take_bad_blocks() == set()
    report = bench.side.take_report()
    assert report is not None
    assert report.received["r"].failure == "timeout"


@pytest.mark.parametrize(
    "ticket", ["garbage", encode(Ticket(("one rank only",), (5, 6, 7))), encode(Ticket(("a", "b"), (5,)))]
)
def test_a_ticket_that_does_not_fit_is_a_failed_pull(bench: Bench, ticket: str) -> None:
    bench.pull("r", ticket, targets=(20, 21))
    assert bench.transfer.pulled == []
    assert bench.side.poll(idle=True) == (set(), {"r"})
    assert bench.side.take_bad_blocks() == {20, 21}


def test_a_confirmation_is_never_reported_as_a_received_request(bench: Bench) -> None:
    bench.pull("r/confirm", parked=False)
    bench.transfer.upcoming = [[Pulled("r/confirm", 0, 0.1)]]
    assert bench.side.poll(idle=True) == (set(), set())
    report = bench.side.take_report()
    assert report is not None
    assert (report.confirmed, report.received) == ({"r/confirm": 1}, {})


@pytest.mark.parametrize("how", ["pulled", "released", "expired"])
def test_a_lease_that_ended_frees_its_request(bench: Bench, how: str) -> None:
    bench.offer("r", "lease")
    bench.transfer.upcoming = [[LeaseEnded("lease", how)]]
    assert bench.side.poll(idle=True) == ({"r"}, set())


def test_a_release_reaches_the_transfer(bench: Bench) -> None:
    bench.offer("r", "lease")
    bench.side.release(["lease", "unknown"])
    assert bench.transfer.released == ["lease"]


def test_a_release_that_overtakes_its_offer_still_frees_the_blocks(bench: Bench) -> None:
    bench.side.release(["lease"])
    bench.offer("r", "lease")
    assert bench.transfer.offered == []
    assert bench.side.poll(idle=True) == ({"r"}, set())


def test_early_releases_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff_worker, "MAX_EARLY_RELEASES", 2)
    bench.side.release(["first", "second", "third"])
    for lease_id in ("first", "second", "third"):
        bench.offer(f"request of {lease_id}", lease_id)
    assert bench.transfer.offered == ["first"]


def test_an_offer_that_fails_frees_the_blocks(bench: Bench) -> None:
    bench.offer("r", "lease")
    bench.offer("again", "lease")
    assert bench.side.poll(idle=False) == ({"again"}, set())


def test_an_idle_step_naps_while_it_waits_and_stops_when_something_happens(bench: Bench) -> None:
    bench.side.poll(idle=True)
    assert bench.naps == []
    bench.pull("r")
    bench.side.poll(idle=False)
    assert bench.naps == []
    bench.transfer.upcoming = [[], [], [], [Pulled("r", 0, 0.0)]]
    assert bench.side.poll(idle=True) == (set(), {"r"})
    assert bench.naps == [handoff_worker.PULL_NAP_S] * 3
    bench.naps.clear()
    bench.offer("p", "lease")
    bench.side.poll(idle=True)
    assert bench.naps == [handoff_worker.LEASE_NAP_S]
