"""The serving side's leases: each ends once, and complete blocks have the prompt's order and checksums."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import UNSHARDED, BlockPart, LeaseEnded
from kvasir_workers.transfer.common.checksums import Sums, known
from kvasir_workers.transfer.common.leases import LeaseState
from kvasir_workers.transfer.nccl.leases import LeaseBook

NAMES = st.sampled_from(["a", "b", "c"])
FENCES = st.integers(1, 2)


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def sums(*values: int) -> Sums:
    return np.array(values, dtype=np.uint64).reshape(-1, 1)


def test_blocks_are_complete_in_their_order_once_their_sums_are_known() -> None:
    book = LeaseBook(Clock(), 1)
    book.grant("l", 1, 10.0, 4)
    late: Future[Sums] = Future()
    book.add("l", [7], known(sums(70)))
    book.add("l", [9, 8], late)
    book.add("l", [5], known(sums(50)))
    found, _ = book.complete("l", 0, 10)
    assert found == (7,)
    late.set_result(sums(90, 80))
    found, their = book.complete("l", 1, 2)
    assert found == (9, 8)
    assert their.ravel().tolist() == [90, 80]
    assert book.complete("l", 3, 10)[0] == (5,)
    assert book.complete("l", 4, 10)[0] == ()


def test_a_lease_is_pulled_when_every_reader_has_confirmed_its_own_part() -> None:
    book = LeaseBook(Clock(), 1)
    book.grant("l", 1, 10.0, 1)
    book.confirm("l", 1, BlockPart(0, 2))
    book.confirm("l", 1, BlockPart(0, 2))
    book.confirm("l", 2, BlockPart(1, 2))
    assert book.take_ended() == []
    book.confirm("l", 1, BlockPart(1, 2))
    assert book.take_ended() == [LeaseEnded("l", "pulled")]


def test_a_lease_past_its_deadline_is_over_before_anybody_polls() -> None:
    clock = Clock()
    book = LeaseBook(clock, 1)
    book.grant("l", 1, 10.0, 3)
    assert book.look("l", 1) == (LeaseState.LIVE, 3)
    clock.now = 10.0
    assert book.look("l", 1)[0] is LeaseState.ENDED
    assert book.take_ended() == [LeaseEnded("l", "expired")]


def test_growing_renews_a_lease() -> None:
    clock = Clock()
    book = LeaseBook(clock, 1)
    book.grant("l", 1, 10.0, 2)
    clock.now = 9.0
    book.add("l", [1], known(sums(1)))
    clock.now = 18.0
    assert book.look("l", 1)[0] is LeaseState.LIVE
    clock.now = 19.0
    assert book.look("l", 1)[0] is LeaseState.ENDED


class Histories(RuleBasedStateMachine):
    """Any order of calls: every grant ends once, and a lease is live exactly from its grant to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.book = LeaseBook(self.clock, 1)
        self.live: dict[str, tuple[int, float]] = {}
        self.over: dict[str, int] = {}
        self.expected: list[LeaseEnded] = []

    def end(self, name: str, how: str) -> None:
        if name in self.live:
            self.over[name] = self.live.pop(name)[0]
            self.expected.append(LeaseEnded(name, how))

    @rule(name=NAMES, fence=FENCES, ttl_s=st.sampled_from([1.0, 3.0]))
    def grant(self, name: str, fence: int, ttl_s: float) -> None:
        if name in self.live:
            with pytest.raises(TransferError, match="live already"):
                self.book.grant(name, fence, ttl_s, 1)
            return
        self.book.grant(name, fence, ttl_s, 1)
        self.live[name] = (fence, self.clock.now + ttl_s)

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        self.book.end(name, "released")
        self.end(name, "released")

    @rule(name=NAMES, fence=FENCES)
    def confirm(self, name: str, fence: int) -> None:
        self.book.confirm(name, fence, UNSHARDED)
        if name in self.live and self.live[name][0] == fence:
            self.end(name, "pulled")

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def poll(self) -> None:
        for name in [name for name, (_, deadline) in self.live.items() if self.clock.now >= deadline]:
            self.end(name, "expired")
        assert self.book.take_ended() == self.expected
        self.expected = []

    @rule()
    def close(self) -> None:
        self.book.close()
        for name in list(self.live):
            self.end(name, "released")

    @invariant()
    def stands_as_it_should(self) -> None:
        for name in ("a", "b", "c"):
            for fence in (1, 2):
                held = self.live[name][0] if name in self.live else self.over.get(name)
                wanted = LeaseState.ABSENT
                if held is not None and held != fence:
                    wanted = LeaseState.FENCED
                elif name in self.live:
                    on_time = self.clock.now < self.live[name][1]
                    wanted = LeaseState.LIVE if on_time else LeaseState.ENDED
                elif held is not None:
                    wanted = LeaseState.ENDED
                assert self.book.look(name, fence)[0] is wanted


TestHistories = Histories.TestCase
