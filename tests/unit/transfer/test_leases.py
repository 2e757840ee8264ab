"""The lease table says of a lease what a receiver may rely on."""

from __future__ import annotations

import ctypes

import msgspec
import pytest

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import LeaseEnded
from kvasir_workers.transfer.nixl import leases
from kvasir_workers.transfer.nixl.agent import NixlAgent
from kvasir_workers.transfer.nixl.leases import LeaseState, LeaseTable, bucket_offset, look_up
from kvasir_workers.transfer.nixl.serving import MAX_NOTIFICATION_BYTES, ServingSide


def read(table: LeaseTable, lease_id: str, fence: int) -> LeaseState:
    """What a receiver finds in the table's memory."""
    address = table.address + bucket_offset(lease_id)
    return look_up(ctypes.string_at(address, leases.BUCKET_BYTES), lease_id, fence)


def test_a_lease_is_absent_then_live_then_ended() -> None:
    table = LeaseTable()
    assert read(table, "a", 1) is LeaseState.ABSENT
    table.grant("a", 1)
    assert read(table, "a", 1) is LeaseState.LIVE
    assert read(table, "a", 2) is LeaseState.FENCED
    assert read(table, "b", 1) is LeaseState.ABSENT
    table.end("a")
    assert read(table, "a", 1) is LeaseState.ENDED


def test_a_lease_granted_again_is_live_under_its_new_fence_only() -> None:
    table = LeaseTable()
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
    table = LeaseTable()
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
    table = LeaseTable()
    names = colliding(leases.WAYS + 1)
    for lease_id in names[:-1]:
        table.grant(lease_id, 1)
        table.end(lease_id)
    table.grant(names[-1], 1)
    assert read(table, names[0], 1) is LeaseState.ABSENT
    assert all(read(table, lease_id, 1) is LeaseState.ENDED for lease_id in names[1:-1])


class Mailbox(NixlAgent):
    """An agent that only delivers messages."""

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = messages

    def notifications(self) -> list[bytes]:
        return self._messages


def test_messages_that_are_not_notices_are_dropped() -> None:
    garbage = [b"", b"\xc1", b"x" * (MAX_NOTIFICATION_BYTES + 1), msgspec.msgpack.encode(["a", "one"])]
    foreign = [msgspec.msgpack.encode(["a", 2]), msgspec.msgpack.encode(["b", 1])]
    serving = ServingSide(Mailbox(garbage + foreign), LeaseTable())
    serving.offer("a", 1, 10.0)
    assert serving.poll(0.0) == []
    assert serving.live == 1
    assert serving.poll(10.0) == [LeaseEnded("a", "expired")]
