"""Reads into staging memory, and their timing."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.kit.engines.pull_bench import BLOCK_BYTES, REGION, Bench, reasons

from kvasir.ports.transfer import BlockPart, KvRegion
from kvasir_workers.transfer.nixl.agent import XferState, senders_answer
from kvasir_workers.transfer.nixl.landing import PEER_SLOTS, SLOTS, StagedLanding

POLLS = 64
"""More than post all reads of a pull."""


class StagedBench(Bench):
    """Reads land in staging memory."""

    lands = StagedLanding


@pytest.fixture
def bench() -> Iterator[StagedBench]:
    kv = np.zeros(REGION.blocks * BLOCK_BYTES, dtype=np.uint8)
    bench = StagedBench(region=KvRegion(int(kv.ctypes.data), BLOCK_BYTES, REGION.blocks))
    yield bench
    bench.side.close()


def test_a_late_pull_fails_at_once_and_its_agent_stays(bench: Bench) -> None:
    bench.pull("late", blocks=3)
    bench.side.poll()
    bench.now = 4.0
    bench.pull("healthy", peer="other")
    bench.side.poll()
    bench.now = 5.0
    assert reasons(bench.side.poll()) == {"late": "timeout"}
    assert [agent.closed for agent in bench.network.agents] == [False]


def test_a_sender_that_hangs_is_asked_for_nothing_until_it_has_answered(bench: Bench) -> None:
    bench.pull("late")
    bench.side.poll()
    bench.now = 5.0
    bench.side.poll()
    bench.pull("next")
    bench.pull("empty", blocks=0)
    assert bench.side.poll() == []
    assert len(bench.network.reads) == 1
    bench.arrive()
    bench.side.poll()
    assert reasons(bench.side.poll()) == {"empty": "pulled"}
    assert len(bench.network.blocks()) == 2


def test_a_pull_from_a_sender_that_hangs_times_out_unasked(bench: Bench) -> None:
    bench.pull("late")
    bench.side.poll()
    bench.now = 5.0
    bench.side.poll()
    bench.pull("next")
    bench.now = 10.0
    assert reasons(bench.side.poll()) == {"next": "timeout"}
    assert len(bench.network.reads) == 1


def test_a_look_at_a_lease_may_be_left_behind_too(bench: Bench) -> None:
    bench.network.answers_lease_reads = False
    bench.pull("a", blocks=0)
    bench.now = 5.0
    assert reasons(bench.side.poll()) == {"a": "timeout"}
    assert not bench.network.agents[0].closed
    bench.network.reads[0].state = XferState.FAILED
    bench.side.poll()
    bench.network.answers_lease_reads = True
    bench.pull("b", blocks=0)
    assert reasons(bench.side.poll()) == {"b": "pulled"}


def hang(bench: Bench, *peers: str) -> None:
    """Pulls from each of these, of more than is read at once, which are left behind."""
    for peer in peers:
        bench.pull(f"{peer}, first", blocks=REGION.blocks, peer=peer)
        bench.pull(f"{peer}, second", blocks=REGION.blocks, peer=peer)
    for _ in range(POLLS):
        assert bench.side.poll() == []
    bench.now += 5.0
    assert set(reasons(bench.side.poll()).values()) == {"timeout"}


def test_senders_that_hang_leave_room_to_others_and_the_agent_goes_with_the_last_of_it(bench: Bench) -> None:
    first, *others = [f"peer-{number}" for number in range(SLOTS // PEER_SLOTS)]
    hang(bench, *others)
    assert len(bench.network.blocks()) == SLOTS - PEER_SLOTS
    assert not bench.network.agents[0].closed
    hang(bench, first)
    assert len(bench.network.blocks()) == SLOTS
    assert [agent.closed for agent in bench.network.agents] == [True, False]
    bench.pull("after", peer=first)
    assert len(bench.network.blocks()) == SLOTS + 1


def test_room_that_was_lost_to_a_sender_is_there_again_when_it_has_answered(bench: Bench) -> None:
    for times in range(2 * SLOTS // PEER_SLOTS):
        hang(bench, "peer")
        assert len(bench.network.blocks()) == (times + 1) * PEER_SLOTS
        bench.arrive()
        bench.side.poll()
    assert [agent.closed for agent in bench.network.agents] == [False]


def test_what_was_staged_is_copied_into_its_part_of_the_blocks() -> None:
    kv = np.zeros((2, 8, 64), dtype=np.uint8)
    staged = StagedLanding([KvRegion(int(layer.ctypes.data), 64, 8) for layer in kv])
    place = staged.take("peer", [5, 2], BlockPart(1, 2))
    assert place is not None
    for number, region in enumerate(place.regions):
        ctypes.memset(region.address, 10 * number + 1, 32)
        ctypes.memset(region.address + 32, 10 * number + 2, 32)
    staged.copy_on(place, [5, 2], BlockPart(1, 2)).result()
    staged.close()
    expected = np.zeros_like(kv)
    for layer in range(2):
        expected[layer, 5, 32:], expected[layer, 2, 32:] = 10 * layer + 1, 10 * layer + 2
    assert (kv == expected).all()


@pytest.mark.parametrize(
    ("host", "rdma", "tls", "answers"),
    [
        ("127.0.0.1", False, None, False),
        ("127.0.0.1", False, "tcp,sm,self", False),
        ("127.0.0.1", True, "tcp,self", True),
        ("10.0.0.1", False, None, True),
        ("10.0.0.1", False, "all", True),
        ("10.0.0.1", True, None, False),
        ("10.0.0.1", True, "rc,self", False),
        ("10.0.0.1", True, "tcp,sm,self", True),
        ("10.0.0.1", True, "^sm", False),
    ],
)
def test_senders_answer_reads_over_tcp(
    host: str, rdma: bool, tls: str | None, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    if tls is not None:
        monkeypatch.setenv("UCX_TLS", tls)
    assert senders_answer(host, rdma=rdma) is answers
