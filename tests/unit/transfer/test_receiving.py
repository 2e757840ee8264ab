"""The pulling side over a fake agent made of lists; the test controls the network."""

from __future__ import annotations

import numpy as np
import pytest
from tests.kit.engines.pull_bench import BLOCK_BYTES, HALVES, REGION, Bench, reasons, sums_of

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import BlockPart, KvRegion, PullFailed, PullSucceeded
from kvasir_workers.transfer.nixl import landing, leases, peers, receiving
from kvasir_workers.transfer.nixl.agent import XferState
from kvasir_workers.transfer.nixl.pages import PageWriter, page_bytes


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_lease_is_read_after_the_last_byte_and_the_sender_told(bench: Bench) -> None:
    bench.pull("a")
    assert bench.side.poll() == []
    assert len(bench.network.reads) == 1
    bench.network.reads[0].state = XferState.DONE
    assert reasons(bench.side.poll()) == {"a": "pulled"}
    assert len(bench.network.reads) == 2
    assert bench.network.notices == ["peer"]


def test_a_lease_that_ended_while_its_blocks_were_read_is_not_pulled(bench: Bench) -> None:
    bench.pull("a")
    bench.side.poll()
    bench.network.table.end("a")
    bench.network.reads[0].state = XferState.DONE
    assert reasons(bench.side.poll()) == {"a": "expired"}
    assert bench.network.notices == []


def test_a_large_pull_is_posted_in_batches(bench: Bench) -> None:
    bench.pull("a", blocks=40)
    bench.side.poll()
    sizes = [sum(length for _, length, _ in read.local) for read in bench.network.blocks()]
    assert sizes == [landing.BATCH_BYTES] * 5
    assert [d for read in bench.network.blocks() for d in read.local] == [
        (REGION.address + i * landing.BATCH_BYTES, landing.BATCH_BYTES, 0) for i in range(5)
    ]


def test_a_read_that_breaks_off_fails_the_pull_once_the_others_have_settled(bench: Bench) -> None:
    bench.pull("a", blocks=16)
    bench.side.poll()
    bench.network.reads[0].state = XferState.FAILED
    assert bench.side.poll() == []
    bench.network.reads[1].state = XferState.DONE
    assert reasons(bench.side.poll()) == {"a": "io"}


def test_a_late_pull_fails_only_when_its_agent_is_gone(bench: Bench) -> None:
    bench.pull("late")
    bench.side.poll()
    bench.now = 4.0
    bench.pull("healthy", peer="other")
    bench.side.poll()
    bench.now = 5.0
    assert bench.side.poll() == []
    assert not bench.network.agents[0].closed
    bench.network.reads[1].state = XferState.DONE
    assert reasons(bench.side.poll()) == {"healthy": "pulled", "late": "timeout"}
    assert [agent.closed for agent in bench.network.agents] == [True, False]


def test_pulls_that_come_while_a_late_one_is_fenced_wait_for_the_new_agent(bench: Bench) -> None:
    bench.pull("late")
    bench.side.poll()
    bench.now = 4.0
    bench.pull("healthy", peer="other")
    bench.side.poll()
    bench.now = 5.0
    bench.side.poll()
    bench.pull("new", peer="third")
    assert bench.side.poll() == []
    assert len(bench.network.blocks()) == 2
    bench.network.reads[1].state = XferState.DONE
    bench.side.poll()
    bench.side.poll()
    assert bench.network.blocks()[-1].peer == "third"
    bench.network.reads[-1].state = XferState.DONE
    assert reasons(bench.side.poll()) == {"new": "pulled"}


def test_two_pulls_that_hang_do_not_hold_each_other_for_ever(bench: Bench) -> None:
    bench.pull("one", timeout_s=5.0)
    bench.pull("two", timeout_s=8.0)
    bench.side.poll()
    bench.now = 5.0
    assert bench.side.poll() == []
    bench.now = 8.0
    assert reasons(bench.side.poll()) == {"one": "timeout", "two": "timeout"}


def test_a_lease_read_that_hangs_times_out(bench: Bench) -> None:
    bench.network.answers_lease_reads = False
    bench.pull("a")
    bench.side.poll()
    bench.network.reads[0].state = XferState.DONE
    assert bench.side.poll() == []
    bench.now = 5.0
    assert reasons(bench.side.poll()) == {"a": "timeout"}
    assert bench.network.agents[0].closed


def test_an_absent_lease_is_read_again_until_it_is_granted(bench: Bench) -> None:
    bench.pull("a", grant=False)
    bench.side.poll()
    bench.network.reads[0].state = XferState.DONE
    assert bench.side.poll() == []
    assert bench.side.poll() == []
    bench.network.table.grant("a", 1)
    assert reasons(bench.side.poll()) == {"a": "pulled"}


def test_an_unreachable_sender_fails_the_pull_at_once(bench: Bench) -> None:
    bench.side.pull("a", bench.offer("a", "gone", b"unreachable"), 1, [1], 5.0)
    assert reasons(bench.side.poll()) == {"a": "unreachable"}


def test_a_sender_that_broke_off_is_connected_to_anew(bench: Bench) -> None:
    bench.pull("a")
    bench.side.poll()
    bench.network.reads[0].state = XferState.FAILED
    assert reasons(bench.side.poll()) == {"a": "io"}
    bench.pull("b")
    bench.side.poll()
    bench.network.reads[-1].state = XferState.DONE
    assert reasons(bench.side.poll()) == {"b": "pulled"}


def test_known_senders_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_PEERS", 3)
    for number in range(8):
        bench.pull(f"lease-{number}", peer=f"peer-{number}")
        bench.side.poll()
        bench.network.reads[-1].state = XferState.DONE
        assert reasons(bench.side.poll()) == {f"lease-{number}": "pulled"}
    assert bench.network.agents[0].peers == {"peer-5", "peer-6", "peer-7"}


def test_pulls_under_way_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(receiving.MAX_PULLS + 1):
        bench.side.pull(f"{number}", bench.offer("unknown"), 0, [], 5.0)
    assert reasons(bench.side.poll()) == {f"{receiving.MAX_PULLS}": "io"}


def test_pulls_that_ended_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MAX_PULLS", 2)
    bench = Bench()
    for number in range(5):
        bench.pull(f"{number}", blocks=0)
        assert reasons(bench.side.poll()) == {f"{number}": "pulled"}


def test_a_pull_id_under_way_cannot_be_used_again(bench: Bench) -> None:
    bench.pull("a")
    with pytest.raises(TransferError, match="under way already"):
        bench.pull("a", grant=False)


def test_a_pull_that_does_not_fit_is_refused(bench: Bench) -> None:
    bench.side.pull("target outside memory", bench.offer("a"), 1, [64], 5.0)
    bench.side.pull("more than offered", bench.offer("a"), 63, [1, 2], 5.0)
    bench.side.pull("before the first", bench.offer("a"), -1, [1], 5.0)
    bench.side.pull("source outside memory", bench.offer("a", known_blocks=65, total=65), 64, [1], 5.0)
    bench.side.pull("half into whole", bench.offer("a"), 0, [1], 5.0, source=BlockPart(0, 2))
    bench.side.pull(
        "no such part", bench.offer("a"), 0, [1], 5.0, source=BlockPart(2, 2), target=BlockPart(0, 2)
    )
    assert set(reasons(bench.side.poll()).values()) == {"layout"}
    assert bench.network.reads == []


def test_blocks_are_read_as_the_page_tells_of_them_and_the_last_look_comes_after_all(bench: Bench) -> None:
    page = bench.page("a", total=6)
    page.add([0], np.zeros((1, 0), np.uint64))
    bench.side.pull("a", bench.offer("a", known_blocks=1, total=6), 1, [10, 11, 12], 5.0)
    bench.side.poll()
    assert bench.read_blocks() == []
    page.add([41, 42], np.zeros((2, 0), np.uint64))
    bench.side.poll()
    assert bench.read_blocks() == [41, 42]
    bench.arrive()
    bench.now = 4.0
    assert bench.side.poll() == []
    page.add([7], np.zeros((1, 0), np.uint64))
    bench.side.poll()
    bench.now = 8.0
    assert bench.side.poll() == []
    looks = len(bench.network.reads)
    bench.arrive()
    assert reasons(bench.side.poll()) == {"a": "pulled"}
    assert len(bench.network.reads) == looks + 1
    assert bench.read_blocks() == [41, 42, 7]


def test_the_deadline_counts_from_the_last_block_that_was_told_of(bench: Bench) -> None:
    page = bench.page("a", total=3)
    bench.side.pull("a", bench.offer("a", known_blocks=0, total=3), 0, [1, 2, 3], 5.0)
    bench.now = 4.9
    page.add([5], np.zeros((1, 0), np.uint64))
    assert bench.side.poll() == []
    bench.arrive()
    bench.now = 9.8
    assert bench.side.poll() == []
    bench.now = 10.0
    (ended,) = bench.side.poll()
    assert isinstance(ended, PullFailed)
    assert (ended.reason, ended.detail) == ("timeout", "no progress within 5 s: 1 of 3 blocks were told of")


def test_a_page_that_is_read_half_written_is_read_again(bench: Bench) -> None:
    page = bench.page("a", total=2)
    page.add([5, 6], np.zeros((2, 0), np.uint64))
    memory = bench.network.pages.bytes
    memory[0] ^= 1
    bench.side.pull("a", bench.offer("a", known_blocks=0, total=2), 0, [1, 2], 5.0)
    assert bench.side.poll() == []
    assert bench.read_blocks() == []
    memory[0] ^= 1
    bench.side.poll()
    assert bench.read_blocks() == [5, 6]


def test_a_lease_granted_anew_is_not_the_one_whose_blocks_were_read(bench: Bench) -> None:
    bench.page("a", total=2).add([5], np.zeros((1, 0), np.uint64))
    bench.side.pull("a", bench.offer("a", known_blocks=0, total=2), 0, [1, 2], 5.0)
    bench.side.poll()
    bench.arrive()
    bench.network.table.end("a")
    bench.page("a", total=2).add([5, 6], np.zeros((2, 0), np.uint64))
    assert reasons(bench.side.poll()) == {"a": "expired"}


def test_blocks_that_come_after_the_ticket_cannot_be_had_without_a_page(bench: Bench) -> None:
    bench.network.table.grant("a", 1)
    bench.side.pull("a", bench.offer("a", known_blocks=1, total=2), 0, [1, 2], 5.0)
    bench.arrive()
    assert reasons(bench.side.poll()) == {"a": "io"}


def test_a_page_of_another_number_of_blocks_fails_the_pull() -> None:
    bench = Bench(parts=4)
    extent = bench.network.pages.take(page_bytes(1, 4))
    assert extent is not None
    assert extent.size == page_bytes(2, 2)
    bench.network.table.grant("a", 1, extent)
    page = PageWriter(bench.network.pages.view(extent), "a", 1, 2, 2)
    page.add([0, 1], sums_of([0, 1], range(2)))
    bench.side.pull("a", bench.offer("a", known_blocks=1, total=1), 0, [20], 5.0)
    bench.arrive()
    (ended,) = bench.side.poll()
    assert isinstance(ended, PullFailed)
    assert (ended.reason, ended.detail) == ("layout", "the lease has 2 blocks, not 1")


@pytest.mark.parametrize(("changed", "how"), [(0, "pulled"), (1, "checksum")])
def test_what_arrived_is_summed_and_compared(changed: int, how: str) -> None:
    bench = Bench(parts=2)
    sums = sums_of([20, 21], range(2))
    sums[1, 1] += np.uint64(changed)
    bench.page("a", total=3).add([0, 1, 2], np.vstack([sums_of([9], range(2)), sums]))
    bench.side.pull("a", bench.offer("a", known_blocks=3, total=3), 1, [20, 21], 5.0)
    bench.arrive()
    (ended,) = bench.side.poll()
    assert reasons([ended]) == {"a": how}
    assert (bench.network.notices == ["peer"]) is (how == "pulled")
    if isinstance(ended, PullFailed):
        assert ended.detail == (
            "block 21, from block 2 of agent peer, sums up to 00000000000003fd, and 00000000000003fe was sent"
        )


def test_the_sums_may_come_after_the_blocks_on_either_side() -> None:
    bench = Bench(parts=1)
    page = bench.page("a", total=1)
    bench.side.pull("a", bench.offer("a", known_blocks=1, total=1), 0, [20], 5.0)
    bench.sums.hold = True
    bench.arrive()
    assert bench.side.poll() == []
    page.add([0], sums_of([20], [0]))
    assert bench.side.poll() == []
    ((waiting, sums),) = bench.sums.held
    waiting.set_result(sums)
    assert reasons(bench.side.poll()) == {"a": "pulled"}


def test_a_rank_of_two_reads_its_half_of_each_block_and_checks_it() -> None:
    half = BLOCK_BYTES // 2
    mine = KvRegion(1 << 41, half, 64)
    bench = Bench(parts=2, layout=HALVES, region=mine)
    # Of the sender's two sums the second is the part's; this rank sums its own blocks as one part.
    bench.page("a", total=2).add([0, 1], np.array([[1, 8], [1, 9]], dtype=np.uint64))
    offer = bench.offer("a", known_blocks=2, total=2)
    bench.side.pull("a", offer, 0, [8, 9], 5.0, source=BlockPart(1, 2))
    (read,) = bench.network.blocks()
    assert read.local == [(mine.address + block * half, half, 0) for block in (8, 9)]
    assert read.remote == [(REGION.address + block * BLOCK_BYTES + half, half, 0) for block in (0, 1)]
    bench.arrive()
    (ended,) = bench.side.poll()
    assert isinstance(ended, PullSucceeded), ended
    assert ended.bytes_moved == 2 * half


def test_sums_of_other_parts_than_are_pulled_are_not_compared() -> None:
    bench = Bench(parts=1, layout=HALVES, region=KvRegion(1 << 41, BLOCK_BYTES // 2, 64))
    bench.page("a", total=1).add([0], np.array([[123]], dtype=np.uint64))
    bench.side.pull("a", bench.offer("a", known_blocks=1, total=1), 0, [8], 5.0, source=BlockPart(1, 2))
    bench.arrive()
    assert reasons(bench.side.poll()) == {"a": "pulled"}


def test_the_lease_table_is_what_receivers_take_it_for() -> None:
    assert np.dtype(leases.ENTRY).itemsize == 48
    assert leases.BUCKET_BYTES * leases.BUCKETS == leases.TABLE_BYTES
