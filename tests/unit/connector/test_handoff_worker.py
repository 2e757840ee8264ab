"""The connector's worker side: orders, and failed transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import (
    UNSHARDED,
    BlockPart,
    KvRegion,
    LeaseEnded,
    Offer,
    PeersRefused,
    PullFailed,
    PullSucceeded,
    TransferEvent,
)
from kvasir_workers.connector.handoff import worker as handoff_worker
from kvasir_workers.connector.handoff.worker import HandoffWorker, RankPlace
from kvasir_workers.connector.orders import (
    ExtendOrder,
    OfferOrder,
    OfferParams,
    PullOrder,
    PullParams,
    Received,
    StepOrders,
)
from kvasir_workers.transfer.common.ticket import Ticket, encode


@dataclass(frozen=True)
class Asked:
    """One pull that the transfer was asked for."""

    pull_id: str
    offer: Offer
    first: int
    targets: tuple[int, ...]
    source: BlockPart
    target: BlockPart
    reader: BlockPart | None


class Script:
    """A transfer whose events the test writes."""

    def __init__(self) -> None:
        self.upcoming: list[list[TransferEvent]] = []
        self.offered: list[str] = []
        self.extended: list[tuple[str, tuple[int, ...]]] = []
        self.pulled: list[Asked] = []
        self.released: list[str] = []

    def register(self, regions: Sequence[KvRegion], layout: KvLayout) -> str:
        return "endpoint"

    def offer(
        self, lease_id: str, fence: int, blocks: Sequence[int], ttl_s: float, total: int | None = None
    ) -> Offer:
        if lease_id in self.offered:
            raise TransferError("live already")
        self.offered.append(lease_id)
        return Offer(lease_id, fence, ttl_s, tuple(blocks), total or len(blocks), "endpoint")

    def extend(self, lease_id: str, blocks: Sequence[int]) -> None:
        self.extended.append((lease_id, tuple(blocks)))

    def pull(
        self,
        pull_id: str,
        offer: Offer,
        first: int,
        target_blocks: Sequence[int],
        timeout_s: float,
        *,
        source: BlockPart = UNSHARDED,
        target: BlockPart = UNSHARDED,
        reader: BlockPart | None = None,
    ) -> None:
        self.pulled.append(Asked(pull_id, offer, first, tuple(target_blocks), source, target, reader))

    def release(self, lease_id: str) -> None:
        self.released.append(lease_id)

    def poll(self) -> list[TransferEvent]:
        return self.upcoming.pop(0) if self.upcoming else []

    def close(self) -> None:
        self.upcoming.clear()


class Bench:
    """Rank 1 of 2 in the only stage, unless said otherwise, whose naps are counted."""

    def __init__(
        self, rank: int = 1, ranks: int = 2, stage: int = 0, stages: int = 1, *, whole: bool = False
    ) -> None:
        self.transfer = Script()
        self.naps: list[float] = []
        place = RankPlace(rank, ranks, stage, stages, layers=4, whole=whole)
        self.side = HandoffWorker(self.transfer, place=place, timeout_s=5.0, pause=self.naps.append)

    def offer(self, request_id: str, lease_id: str, *, final: bool = True) -> None:
        order = OfferOrder(request_id, OfferParams(lease_id, 1, 10.0), (1, 2), 2 if final else 5, final)
        self.side.lease(StepOrders(offers=(order,)))

    def extend(self, request_id: str, lease_id: str, *blocks: int, final: bool = False) -> None:
        self.side.lease(StepOrders(offers=(ExtendOrder(request_id, lease_id, blocks, final),)))

    def pull(
        self,
        pull_id: str,
        ticket: str | None = None,
        *,
        first: int = 0,
        targets: tuple[int, ...] = (),
        parked: bool = True,
    ) -> None:
        text = encode(Ticket(("rank 0", "rank 1"), (5, 6, 7), 3)) if ticket is None else ticket
        self.side.pull([PullOrder(pull_id, PullParams("l", 1, 10.0, 3, text), first, targets, parked)])


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_rank_pulls_its_own_part_from_the_first_missing_block(bench: Bench) -> None:
    bench.pull("r", first=1, targets=(20, 21))
    (asked,) = bench.transfer.pulled
    assert (asked.pull_id, asked.offer.endpoint, asked.offer.blocks) == ("r", "rank 1", (5, 6, 7))
    assert (asked.first, asked.targets, asked.source, asked.target) == (1, (20, 21), UNSHARDED, UNSHARDED)
    bench.transfer.upcoming = [[PullSucceeded("r", 2000, 0.25)]]
    assert bench.side.poll(idle=True) == (set(), {"r"})
    report = bench.side.take_report()
    assert report is not None
    assert report.received == {"r": Received(2000, 0.25)}
    assert bench.side.take_failed() == set()
    assert bench.side.take_report() is None


def test_a_failed_pull_reports_the_request_as_received_and_its_blocks_as_bad(bench: Bench) -> None:
    bench.pull("r", targets=(20, 21))
    bench.transfer.upcoming = [[PullFailed("r", "timeout", "")]]
    assert bench.side.poll(idle=True) == (set(), {"r"})
    assert bench.side.take_failed() == {"r"}
    assert bench.side.take_failed() == set()
    report = bench.side.take_report()
    assert report is not None
    assert report.received["r"].failure == "timeout"


@pytest.mark.parametrize(
    "ticket",
    [
        "garbage",
        encode(Ticket((), (5, 6, 7), 3)),
        encode(Ticket(("a", "b", "c"), (5, 6, 7), 3)),
        encode(Ticket(("a", "b"), (5,), 1)),
    ],
)
def test_a_ticket_that_does_not_fit_is_a_failed_pull(bench: Bench, ticket: str) -> None:
    bench.pull("r", ticket, targets=(20, 21))
    assert bench.transfer.pulled == []
    assert bench.side.poll(idle=True) == (set(), {"r"})
    assert bench.side.take_failed() == {"r"}


def test_a_confirmation_is_never_reported_as_a_received_request(bench: Bench) -> None:
    bench.pull("r/confirm", parked=False)
    bench.transfer.upcoming = [[PullSucceeded("r/confirm", 0, 0.1)]]
    assert bench.side.poll(idle=True) == (set(), set())
    report = bench.side.take_report()
    assert report is not None
    assert (report.confirmed, report.received) == ({"r/confirm": 1}, {})


@pytest.mark.parametrize("how", ["pulled", "released", "expired"])
def test_a_lease_that_ended_frees_its_request(bench: Bench, how: str) -> None:
    bench.offer("r", "lease")
    bench.transfer.upcoming = [[LeaseEnded("lease", how)]]
    assert bench.side.poll(idle=True) == ({"r"}, set())


def test_a_lease_that_grows_frees_its_request_only_once_it_is_final(bench: Bench) -> None:
    bench.offer("r", "lease", final=False)
    bench.extend("r", "lease", 3)
    bench.extend("r", "lease", 4, 5, final=True)
    assert bench.transfer.extended == [("lease", (3,)), ("lease", (4, 5))]
    bench.transfer.upcoming = [[LeaseEnded("lease", "pulled")]]
    assert bench.side.poll(idle=True) == ({"r"}, set())


@pytest.mark.parametrize("how", ["pulled", "released", "expired"])
def test_a_lease_that_ends_while_its_request_runs_frees_it_at_its_end(bench: Bench, how: str) -> None:
    bench.offer("r", "lease", final=False)
    bench.transfer.upcoming = [[LeaseEnded("lease", how)]]
    assert bench.side.poll(idle=False) == (set(), set())
    bench.extend("r", "lease", 3)
    assert bench.side.poll(idle=False) == (set(), set())
    bench.extend("r", "lease", 4, 5, final=True)
    assert bench.side.poll(idle=False) == ({"r"}, set())
    assert bench.transfer.extended == []


def test_a_request_that_lost_its_blocks_loses_its_lease_and_is_never_reported(bench: Bench) -> None:
    bench.offer("r", "lease", final=False)
    bench.side.lease(StepOrders(releases=("lease", "unknown")))
    assert bench.transfer.released == ["lease"]
    bench.transfer.upcoming = [[LeaseEnded("lease", "released")]]
    assert bench.side.poll(idle=False) == (set(), set())


def test_a_rank_reads_its_share_of_a_rank_that_holds_more_heads() -> None:
    for rank, share in (
        (0, BlockPart(0, 2)),
        (1, BlockPart(1, 2)),
        (2, BlockPart(0, 2)),
        (3, BlockPart(1, 2)),
    ):
        bench = Bench(rank, ranks=4)
        bench.pull("r", targets=(20, 21))
        (asked,) = bench.transfer.pulled
        assert asked.offer.endpoint == f"rank {rank // 2}"
        assert (asked.source, asked.target) == (share, UNSHARDED)


def test_a_rank_joins_what_several_ranks_hold_of_its_heads() -> None:
    bench = Bench(rank=0, ranks=1)
    bench.pull("r", targets=(20, 21))
    assert [(asked.offer.endpoint, asked.source, asked.target) for asked in bench.transfer.pulled] == [
        ("rank 0", UNSHARDED, BlockPart(0, 2)),
        ("rank 1", UNSHARDED, BlockPart(1, 2)),
    ]
    one, other = (asked.pull_id for asked in bench.transfer.pulled)
    bench.transfer.upcoming = [[PullSucceeded(one, 1000, 0.25)], [PullSucceeded(other, 1000, 0.5)]]
    assert bench.side.poll(idle=False) == (set(), set())
    assert bench.side.take_report() is None
    assert bench.side.poll(idle=False) == (set(), {"r"})
    report = bench.side.take_report()
    assert report is not None
    assert report.received == {"r": Received(2000, 0.5)}


def test_a_joined_pull_fails_only_when_no_piece_is_under_way() -> None:
    bench = Bench(rank=0, ranks=1)
    bench.pull("r", targets=(20, 21))
    one, other = (asked.pull_id for asked in bench.transfer.pulled)
    bench.transfer.upcoming = [[PullFailed(one, "io", "")], [PullSucceeded(other, 1000, 0.5)]]
    assert bench.side.poll(idle=False) == (set(), set())
    assert bench.side.take_failed() == set()
    assert bench.side.poll(idle=False) == (set(), {"r"})
    assert bench.side.take_failed() == {"r"}


def test_a_rank_that_needs_a_latent_reads_it_whole_from_a_rank_that_several_read() -> None:
    bench = Bench(rank=3, ranks=4, whole=True)
    bench.pull("r", targets=(20, 21))
    (asked,) = bench.transfer.pulled
    assert (asked.offer.endpoint, asked.targets) == ("rank 1", (20, 21))
    assert (asked.source, asked.target, asked.reader) == (UNSHARDED, UNSHARDED, BlockPart(1, 2))


def test_of_ranks_that_have_the_same_latent_one_is_read_and_the_others_are_confirmed() -> None:
    bench = Bench(rank=0, ranks=1, whole=True)
    bench.pull("r", targets=(20, 21))
    assert [(asked.offer.endpoint, asked.targets, asked.reader) for asked in bench.transfer.pulled] == [
        ("rank 0", (20, 21), UNSHARDED),
        ("rank 1", (), UNSHARDED),
    ]
    one, other = (asked.pull_id for asked in bench.transfer.pulled)
    bench.transfer.upcoming = [[PullSucceeded(one, 2000, 0.25), PullSucceeded(other, 0, 0.0)]]
    assert bench.side.poll(idle=False) == (set(), {"r"})
    report = bench.side.take_report()
    assert report is not None
    assert report.received == {"r": Received(2000, 0.25)}


FOUR = ("stage 0 rank 0", "stage 0 rank 1", "stage 1 rank 0", "stage 1 rank 1")


def test_a_stage_pulls_from_the_same_stage_of_an_engine_with_as_many() -> None:
    bench = Bench(rank=1, ranks=2, stage=1, stages=2)
    bench.pull("r", encode(Ticket(FOUR, (5, 6, 7), 3, stages=2)), targets=(20, 21))
    (asked,) = bench.transfer.pulled
    assert (asked.pull_id, asked.offer.endpoint) == ("r", "stage 1 rank 1")


def test_an_engine_of_one_stage_pulls_from_every_stage_that_has_its_layers() -> None:
    bench = Bench(rank=0, ranks=1)
    bench.pull("r", encode(Ticket(FOUR, (5, 6, 7), 3, stages=2)), targets=(20, 21))
    assert [(asked.offer.endpoint, asked.target) for asked in bench.transfer.pulled] == [
        ("stage 0 rank 0", BlockPart(0, 2)),
        ("stage 0 rank 1", BlockPart(1, 2)),
        ("stage 1 rank 0", BlockPart(0, 2)),
        ("stage 1 rank 1", BlockPart(1, 2)),
    ]
    assert len({asked.pull_id for asked in bench.transfer.pulled}) == 4


def test_a_stage_leaves_out_the_stages_whose_layers_others_have() -> None:
    bench = Bench(rank=0, ranks=1, stage=1, stages=2)
    bench.pull("r", encode(Ticket(("a", "b", "c", "d"), (5,), 1, stages=4)), targets=(20,))
    assert [asked.offer.endpoint for asked in bench.transfer.pulled] == ["c", "d"]


@pytest.mark.parametrize("stages", [0, 3])
def test_a_ticket_whose_ranks_do_not_divide_among_its_stages_is_a_failed_pull(stages: int) -> None:
    bench = Bench(rank=0, ranks=1)
    bench.pull("r", encode(Ticket(FOUR, (5,), 1, stages=stages)), targets=(20,))
    assert bench.transfer.pulled == []
    assert bench.side.poll(idle=False) == (set(), {"r"})
    assert bench.side.take_failed() == {"r"}


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
    bench.transfer.upcoming = [[], [], [], [PullSucceeded("r", 0, 0.0)]]
    assert bench.side.poll(idle=True) == (set(), {"r"})
    assert bench.naps == [handoff_worker.PULL_NAP_S] * 3
    bench.naps.clear()
    bench.pull("slow", encode(Ticket(("rank 0", "rank 1"), (5,), 3)))
    for _ in range(handoff_worker.PATIENT_AFTER):
        bench.side.poll(idle=True)
    assert set(bench.naps) == {handoff_worker.PULL_NAP_S}
    bench.naps.clear()
    bench.side.poll(idle=True)
    assert bench.naps == [handoff_worker.PATIENT_NAP_S]
    bench.naps.clear()
    bench.pull("whole")
    for _ in range(handoff_worker.PATIENT_AFTER + 1):
        bench.side.poll(idle=True)
    assert set(bench.naps) == {handoff_worker.PULL_NAP_S}
    bench.transfer.upcoming = [[PullSucceeded("whole", 0, 0.0)]]
    bench.side.poll(idle=True)
    bench.transfer.upcoming = [[PullSucceeded("slow", 0, 0.0)]]
    bench.side.poll(idle=True)
    bench.naps.clear()
    bench.offer("p", "lease")
    bench.side.poll(idle=True)
    assert bench.naps == [handoff_worker.LEASE_NAP_S]


def test_peers_that_the_transfer_refused_are_reported_once() -> None:
    bench = Bench()
    bench.transfer.upcoming = [[PeersRefused(3)], [PeersRefused(2)]]
    for _ in range(2):
        assert bench.side.poll(idle=False) == (set(), set())
    report = bench.side.take_report()
    assert report is not None
    assert report.refused == 5
    assert bench.side.take_report() is None
