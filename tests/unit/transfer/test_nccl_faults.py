"""A sender is killed or stopped while blocks move: its pull fails, its successor works, and the receiver
continues."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch")

from tests.kit.engines.transfer_peers import BLOCKS, ForkedPeer, ProcessPeer

from kvasir.ports.transfer import PullFailed, PullSucceeded, TransferEvent

pytestmark = pytest.mark.slow

BLOCK_BYTES = 4 << 20
PATIENCE_S = 60.0
SENT = BLOCKS - 1
"""The last block never becomes complete, so that no pull of all of them can end before its sender does."""


AnyPeer = ForkedPeer | ProcessPeer


@pytest.fixture
def start() -> Iterator[Callable[[], ForkedPeer]]:
    """Starts agents, each in a process of its own."""
    started: list[ForkedPeer] = []

    def one() -> ForkedPeer:
        peer = ForkedPeer(f"peer-{len(started)}", "nccl")
        started.append(peer)
        peer.start(BLOCK_BYTES)
        return peer

    yield one
    for peer in started:
        peer.end()


def event(peer: AnyPeer, advance_s: float = 0.0) -> TransferEvent:
    """What ends next, while the peer's clock goes on by so much with each look: a sender that was stopped may
    have chunks on their way still."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < deadline_s
        peer.advance(advance_s)
        found: list[TransferEvent] = peer.poll()
        if found:
            (ended,) = found
            return ended


def pulling(source: AnyPeer, target: AnyPeer, timeout_s: float) -> None:
    """Return with the source stopped in the midst of a pull: the first block has come, the last has not."""
    for block in range(SENT):
        source.write(block, block + 1)
    target.pull("big", source.offer("big", 1, range(SENT), 60.0, BLOCKS), 0, range(BLOCKS), timeout_s)
    first = source.read(0)
    deadline_s = time.monotonic() + PATIENCE_S
    while target.read(0) != first:
        assert time.monotonic() < deadline_s
    os.kill(source.pid, signal.SIGSTOP)
    # What had left the source before is taken in meanwhile, so that part of a chunk is missing.
    for _ in range(20):
        assert target.poll() == []
    assert target.read(SENT - 1) == bytes(len(first))


def pulled(source: AnyPeer, target: AnyPeer) -> None:
    """A pull that goes well."""
    for block in (1, 2):
        source.write(block, 50 + block)
    target.pull("well", source.offer("well", 1, [1, 2], 60.0), 0, [7, 5], 60.0)
    ended = event(target)
    assert isinstance(ended, PullSucceeded), ended
    assert (target.read(7), target.read(5)) == (source.read(1), source.read(2))


def test_a_sender_that_is_killed_in_mid_transfer_is_replaced_without_a_restart(
    start: Callable[[], ForkedPeer],
) -> None:
    source, bystander, target = start(), start(), start()
    pulled(bystander, target)
    pulling(source, target, 60.0)
    os.kill(source.pid, signal.SIGKILL)
    ended = event(target)
    assert isinstance(ended, PullFailed)
    assert ended.reason == "io"
    pulled(bystander, target)
    pulled(start(), target)


def test_a_sender_that_stops_in_mid_transfer_fails_at_the_deadline_and_writes_nothing_more(
    start: Callable[[], ForkedPeer],
) -> None:
    source, bystander, target = start(), start(), start()
    pulling(source, target, 5.0)
    try:
        ended = event(target, 5.0)
        assert isinstance(ended, PullFailed)
        assert ended.reason == "timeout"
        for block in range(BLOCKS):
            target.write(block, 200)
        before = [target.read(block) for block in (0, SENT // 2, SENT)]
        pulled(bystander, target)
    finally:
        os.kill(source.pid, signal.SIGCONT)
    pulled(source, target)
    assert [target.read(block) for block in (0, SENT // 2, SENT)] == before


def test_a_process_that_ends_without_closing_its_agent_ends_cleanly() -> None:
    source, target = ProcessPeer("source", "nccl"), ProcessPeer("target", "nccl")
    try:
        for peer in (source, target):
            peer.start(BLOCK_BYTES)
        pulling(source, target, 60.0)
        try:
            assert target.end() == 0
        finally:
            os.kill(source.pid, signal.SIGCONT)
        assert source.end() == 0
    finally:
        for peer in (source, target):
            peer.end()
