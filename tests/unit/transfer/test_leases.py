"""The lease table and the serving side report lease states on which a receiver can rely."""

from __future__ import annotations

import ctypes
import logging

import msgspec
import numpy as np
import pytest

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import UNSHARDED, BlockPart, KvRegion, LeaseEnded, Offer
from kvasir_workers.transfer.common import checksums
from kvasir_workers.transfer.common.checksums import HostSums
from kvasir_workers.transfer.common.lease_keys import Refusals, lease_key
from kvasir_workers.transfer.common.leases import LeaseState
from kvasir_workers.transfer.nixl import leases
from kvasir_workers.transfer.nixl.agent import NixlAgent
from kvasir_workers.transfer.nixl.leases import (
    Extent,
    NixlLeaseTable,
    TableEntry,
    bucket_offset,
    look_up,
)
from kvasir_workers.transfer.nixl.pages import Page, PageMemory, page_bytes, parse
from kvasir_workers.transfer.nixl.serving import MAX_NOTIFICATION_BYTES, NixlSender, PulledNotice

SECRET = b"s" * 32


def find(table: NixlLeaseTable, lease_id: str, fence: int) -> TableEntry:
    """What a receiver finds in the table's memory."""
    address = table.address + bucket_offset(lease_id)
    return look_up(ctypes.string_at(address, leases.BUCKET_BYTES), lease_id, fence)


def read(table: NixlLeaseTable, lease_id: str, fence: int) -> LeaseState:
    return find(table, lease_id, fence).state


def test_a_lease_is_absent_then_live_then_ended() -> None:
    table = NixlLeaseTable()
    assert read(table, "a", 1) is LeaseState.ABSENT
    table.grant("a", 1)
    assert read(table, "a", 1) is LeaseState.LIVE
    assert read(table, "a", 2) is LeaseState.FENCED
    assert read(table, "b", 1) is LeaseState.ABSENT
    table.end("a")
    assert read(table, "a", 1) is LeaseState.ENDED


def test_a_lease_granted_again_is_live_under_its_new_fence_only() -> None:
    table = NixlLeaseTable()
    table.grant("a", 1)
    table.end("a")
    table.grant("a", 2)
    assert read(table, "a", 2) is LeaseState.LIVE
    assert read(table, "a", 1) is LeaseState.FENCED


def colliding(count: int) -> list[str]:
    """Lease ids of one bucket."""
    names = (f"lease-{i}" for i in range(10**6))
    home = bucket_offset("lease-0")
    return [
        name for name, _ in zip((n for n in names if bucket_offset(n) == home), range(count), strict=False)
    ]


def test_a_full_bucket_refuses_another_lease_until_one_ends() -> None:
    table = NixlLeaseTable()
    *held, extra = colliding(leases.WAYS + 1)
    for lease_id in held:
        table.grant(lease_id, 1)
    with pytest.raises(TransferError, match="no room"):
        table.grant(extra, 1)
    table.end(held[3])
    table.grant(extra, 1)
    assert read(table, extra, 1) is LeaseState.LIVE
    assert all(read(table, lease_id, 1) is LeaseState.LIVE for lease_id in held if lease_id != held[3])


def test_the_oldest_tombstone_makes_room_first() -> None:
    table = NixlLeaseTable()
    names = colliding(leases.WAYS + 1)
    for lease_id in names[:-1]:
        table.grant(lease_id, 1)
        table.end(lease_id)
    table.grant(names[-1], 1)
    assert read(table, names[0], 1) is LeaseState.ABSENT
    assert all(read(table, lease_id, 1) is LeaseState.ENDED for lease_id in names[1:-1])


def test_every_grant_has_a_number_and_says_where_its_page_is() -> None:
    table = NixlLeaseTable()
    table.grant("a", 1, Extent(64, 100))
    assert find(table, "a", 1).page == Extent(64, 100)
    first = find(table, "a", 1).grant
    table.end("a")
    table.grant("a", 1)
    assert find(table, "a", 1).page is None
    assert find(table, "a", 1).grant > first


class Mailbox(NixlAgent):
    """An agent that only delivers messages."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def notifications(self) -> list[bytes]:
        messages, self.messages = self.messages, []
        return messages


class Bench:
    """A serving side over 64 blocks of 16 bytes in two layers; `parts` sums for each block."""

    def __init__(self, parts: int = 1, page_memory: int = 1 << 16) -> None:
        self.kv = np.arange(2 * 64 * 16, dtype=np.uint16).view(np.uint8).reshape(4, 64, 16)[:2].copy()
        regions = [KvRegion(int(layer.ctypes.data), 16, 64) for layer in self.kv]
        self.sums = HostSums(regions)
        self.mailbox, self.table, self.pages = Mailbox(), NixlLeaseTable(), PageMemory(page_memory)
        self.parts = parts
        self.side = NixlSender(
            self.mailbox,
            self.table,
            self.pages,
            HostSums(regions),
            parts,
            secret=SECRET,
            refusals=Refusals(lambda: 0.0),
        )

    def offer(self, lease_id: str, blocks: list[int], total: int | None = None) -> None:
        total = len(blocks) if total is None else total
        self.side.offer(lease_id, 1, blocks, total=total, ttl_s=10.0, now=0.0)

    def page(self, lease_id: str) -> Page | None:
        """What a receiver finds in the lease's page."""
        found = find(self.table, lease_id, 1)
        assert found.state is LeaseState.LIVE
        if found.page is None:
            return None
        return parse(self.pages.view(found.page), lease_id, 1)

    def confirm(self, *notice: object) -> list[LeaseEnded]:
        self.mailbox.messages.append(msgspec.msgpack.encode(list(notice)))
        return self.side.poll(0.0)

    def confirmed(self, lease_id: str, fence: int, part: int, of: int) -> list[LeaseEnded]:
        """What ends when a holder of the ticket confirms its part."""
        offer = Offer(lease_id, fence, 10.0, (), 0, "")
        key = lease_key(SECRET, lease_id, fence)
        notice = PulledNotice.signed(offer, BlockPart(part, of), key)
        self.mailbox.messages.append(msgspec.msgpack.encode(notice))
        return self.side.poll(0.0)


def test_messages_that_are_not_notices_are_dropped() -> None:
    bench = Bench()
    bench.offer("a", [1])
    bench.mailbox.messages = [b"", b"\xc1", b"x" * (MAX_NOTIFICATION_BYTES + 1)]
    assert bench.side.poll(0.0) == []
    some = b"x" * 32
    for garbage in (
        ["a", "one", 0, 1, some],
        ["a", 1],
        ["a", 1, 1, 1, some],
        ["a", -1, 0, 1, some],
        ["a"] * 5,
    ):
        assert bench.confirm(*garbage) == []
    assert bench.side.take_refused() == 8
    for foreign in (("a", 2, 0, 1), ("b", 1, 0, 1)):
        assert bench.confirmed(*foreign) == []
    assert bench.side.live == 1
    assert bench.side.poll(10.0) == [LeaseEnded("a", "expired")]


def test_who_has_no_ticket_cannot_end_a_lease_and_is_counted() -> None:
    bench = Bench()
    bench.offer("a", [1])
    offer, other = Offer("a", 1, 10.0, (), 0, ""), Offer("b", 1, 10.0, (), 0, "")
    stolen = PulledNotice.signed(other, UNSHARDED, lease_key(SECRET, "b", 1)).proof
    for proof in (b"", b"x" * 32, SECRET, stolen, lease_key(SECRET, "a", 1)):
        assert bench.confirm("a", 1, 0, 1, proof) == []
    half = PulledNotice.signed(offer, BlockPart(0, 2), lease_key(SECRET, "a", 1)).proof
    assert bench.confirm("a", 1, 0, 1, half) == [], "a proof of one part is none of the whole"
    assert bench.side.live == 1
    assert bench.side.take_refused() == 6
    assert bench.side.take_refused() == 0
    assert bench.confirmed("a", 1, 0, 1) == [LeaseEnded("a", "pulled")]


def test_a_lease_is_pulled_when_each_part_has_been_confirmed() -> None:
    bench = Bench()
    bench.offer("a", [1])
    assert bench.confirmed("a", 1, 0, 2) == []
    assert bench.confirmed("a", 1, 0, 2) == []
    assert bench.confirmed("a", 1, 1, 2) == [LeaseEnded("a", "pulled")]
    assert bench.confirmed("a", 1, 1, 2) == []


def test_a_page_tells_of_blocks_as_they_become_complete_with_their_sums() -> None:
    bench = Bench(parts=2)
    bench.offer("a", [7], total=3)
    page = bench.page("a")
    assert page is not None
    assert (page.total, page.ids) == (3, (7,))
    bench.side.extend("a", [9, 4], now=8.0)
    page = bench.page("a")
    assert page is not None
    assert page.ids == (7, 9, 4)
    assert (page.sums == bench.sums.begin([7, 9, 4], 2).result()).all()
    bench.side.extend("a", [5], now=8.0)
    page = bench.page("a")
    assert page is not None
    assert page.ids == (7, 9, 4)
    assert bench.side.poll(17.9) == []
    assert bench.side.poll(18.0) == [LeaseEnded("a", "expired")]


def test_sums_that_take_long_reach_the_page_without_the_step_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "INLINE_BYTES", 0)
    bench = Bench()
    bench.offer("a", [7, 8, 9])
    bench.side.extend("a", [], now=0.0)
    bench.side._sums.close()  # waits for what is being summed
    page = bench.page("a")
    assert page is not None
    assert page.ids == (7, 8, 9)


def test_a_whole_lease_without_sums_needs_no_page() -> None:
    bench = Bench(parts=0)
    bench.offer("whole", [1, 2])
    bench.offer("begun", [1], total=2)
    assert bench.page("whole") is None
    page = bench.page("begun")
    assert page is not None
    assert (page.ids, page.sums.shape) == ((1,), (1, 0))


def test_without_room_for_a_page_a_lease_is_offered_when_it_is_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(page_memory=page_bytes(2, 1) + 63)
    with caplog.at_level(logging.WARNING):
        bench.offer("first", [1], total=2)
        bench.offer("late", [1], total=2)
        bench.offer("whole", [1, 2])
    assert [record.getMessage().split()[1] for record in caplog.records] == ["late", "whole"]
    assert find(bench.table, "late", 1).state is LeaseState.ABSENT
    assert bench.page("whole") is None
    bench.side.extend("late", [2], now=0.0)
    assert bench.page("late") is None
    bench.side.end("first", "released")
    bench.offer("again", [1])
    assert bench.page("again") is not None
